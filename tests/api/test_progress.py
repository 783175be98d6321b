"""Long work shows itself: to people at a terminal, to nobody else, and never on standard output."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console
from torch import nn

import canzona_compile
from canzona_compile.compat import telling as logs
from canzona_compile.compat import telling as progress
from canzona_compile.errors import CanzonaError

FOR_EVER = 1e6  # seconds


@pytest.fixture(autouse=True)
def quiet_loggers() -> Iterator[None]:
    """Loggers as they are for users, whatever commands ran before in this process; afterwards as they were."""
    root, part = (logging.getLogger(name) for name in (logs.ROOT, *logs.PARTS["capture"]))
    before = list(root.handlers), root.propagate, root.level, part.level
    root.handlers[:], root.propagate = [], True
    root.setLevel(logging.WARNING)
    part.setLevel(logging.NOTSET)
    yield
    root.handlers[:], root.propagate = before[:2]
    root.setLevel(before[2])
    part.setLevel(before[3])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_what_is_told(terminal: Console, capfd: pytest.CaptureFixture[str]) -> None:
    with progress.shown("plan", console=terminal):
        progress.tell("simulating [the] step", 1, 4)
        while not written(terminal):
            pass
        progress.tell("and more")  # of the same part
    text = written(terminal)
    assert "plan: and more" in text
    assert "25%" in text
    assert text.endswith(("\x1b[2K", "\x1b[?25h")), "the line goes away again"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("why", ["soon", "quiet", "file", "inside", "logged", "variable"])
def test_nobody_else_sees_a_line(
    why: str, terminal: Console, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    console = Console(file=io.StringIO(), force_terminal=False) if why == "file" else terminal
    if why == "variable":
        monkeypatch.setenv(logs.VARIABLE, "session")
    with contextlib.ExitStack() as stack:
        if why == "logged":
            stack.enter_context(caplog.at_level(logging.INFO, logs.ROOT))
        if why == "inside":
            stack.enter_context(progress.heard_by(lambda words, done=0, total=0: heard.append(words)))
        patience = FOR_EVER if why in ("soon", "logged") else 0.0
        with progress.shown("verify", patience=patience, quiet=why == "quiet", console=console):
            progress.tell("step 1", 1, 2)
            assert progress.ours.isEnabledFor(logging.INFO) == (why == "logged")
    progress.tell("nobody hears this")
    assert written(console) == ""
    assert heard == (["step 1"] if why == "inside" else [])


@pytest.mark.parametrize("why", ["file", "no rich", "logged", "variable", "quiet", "command"])
def test_elsewhere_long_work_says_once_what_is_under_way(
    why: str, terminal: Console, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the first words after five seconds; a command says what it has to say itself."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "find_spec", lambda name: None)  # without rich
    others = {"no rich": None, **dict.fromkeys(("file", "command"), Console(file=io.StringIO(), force_terminal=False))}
    if why == "variable":
        monkeypatch.setenv(logs.VARIABLE, "session")
    progress.ours.setLevel(logging.INFO if why == "logged" else logging.WARNING)
    patience, console = 0.0 if why == "command" else FOR_EVER, others.get(why, terminal)
    with progress.shown("canzona, first step", patience=patience, quiet=why == "quiet", console=console):
        for seconds, words, done in ((4.9, "rehearsing", 0), (0.0, "looking at q", 3), (0.1, "capturing q", 0)):
            now[0] += seconds
            progress.tell(words, done, 11 if done else 0)
        now[0] += 100.0
        progress.tell("planning")
    progress.tell("nobody waits for this")
    said = ["canzona, first step, after 5 s: capturing q (part 3 of 11). CANZONA_LOGS=+progress says more"]
    assert [r.getMessage() for r in caplog.records] == ([] if why in ("quiet", "command") else said)


def test_the_first_step_says_what_it_does() -> None:
    model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Linear(20, 12, bias=False))
    optimizer = canzona_compile.wrap(torch.optim.Muon(model.parameters()), model=model)
    heard: list[list[tuple[str, int, int]]] = []
    for _ in range(2):
        heard.append([])
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with progress.heard_by(lambda words, done=0, total=0: heard[-1].append((words, done, total))):
            optimizer.step()
    assert [told[1:] for told in heard[0] if told[2]] == [(1, 2), (2, 2)], "kinds"
    first, second = ([words for words, _, _ in told] for told in heard)
    assert "capturing the update of 20x12 f32, 0.weight" in first
    kinds = dict.fromkeys(words.split()[0] for words in first)
    assert [kind for kind in kinds if kind in ("rehearsing", "capturing", "planning", "making", "taking")] == [
        *("rehearsing", "capturing", "planning", "making", "taking")
    ]
    assert second == []


# -- CANZONA_LOGS ------------------------------------------------------------------------------------


def test_levels_by_name() -> None:
    assert logs.levels("") == {}
    assert logs.levels("all") == {"canzona_compile": logging.INFO}
    assert logs.levels("+capture, -tools") == {
        "canzona_compile.capture": logging.DEBUG,
        "canzona_compile.tools": logging.ERROR,
    }
    with pytest.raises(
        CanzonaError, match=r"no logger 'everything'\n  at:   CANZONA_LOGS=everything\n  hint: use one of"
    ):
        logs.levels("everything")


def test_what_is_asked_for_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = logging.getLogger("canzona_compile.capture.anything")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    assert not logs.set_up()
    part.info("quiet by default")
    monkeypatch.setenv(logs.VARIABLE, "capture")
    assert logs.set_up()
    assert logs.set_up()  # commands ask again
    part.info("this")
    part.debug("not this")
    logging.getLogger("canzona_compile.session.anything").info("nor this")
    assert capsys.readouterr() == ("", "[rank3] canzona_compile.capture.anything: this\n")


def test_words_on_progress_are_logged_by_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger(*logs.PARTS["progress"]), "debug", lambda _form, words: said.append(words))
    progress.tell("something")
    assert said == ["something"]


def test_the_first_step_draws_nothing_from_the_random_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich does, when it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    optimizer = canzona_compile.wrap(torch.optim.Muon([nn.Parameter(torch.ones(3, 2))]))
    random.seed(0)
    before = random.getstate()
    optimizer.step()
    assert "rich.style" in sys.modules
    assert random.getstate() == before
