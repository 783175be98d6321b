"""The demo, run by processes of a test."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from unittest import mock

import torch.distributed as dist

from tests.docs.scripts import ROOT

EXAMPLES = ROOT / "examples"


def train_here(options: str, meeting_point: str) -> tuple[bool, str]:
    """What the demo has each of its processes do: whether all went well, and what was printed."""
    rank, printed = dist.get_rank(), io.StringIO()
    dist.barrier()  # or the first rank hangs up while another one still connects
    dist.destroy_process_group()
    sys.path.insert(0, str(EXAMPLES))
    demo = importlib.import_module("train_lm")
    with (
        mock.patch.object(sys, "argv", ["train_lm.py", *options.split()]),
        mock.patch.dict(os.environ, COLUMNS="120"),
        contextlib.redirect_stdout(printed),
    ):
        return demo.worker(rank, demo.parse(), meeting_point), printed.getvalue()
