"""The tests that stand for the whole with another version of torch, Triton or Python: `make test-torch TORCH=2.11.0`.

Each kind of thing that a release of those may break, with files or functions of it. Run as a program, this prints them
for pytest. Tests with the mark `full` and tests of other packages are left out. `tests/test_selection.py` says what has
to be here. Meant for about four minutes on two idle cores.
"""

from __future__ import annotations

CORE: dict[str, tuple[str, ...]] = {
    "private names of torch, and imports": ("tests/test_structure.py", "tests/runtime/test_waiter.py"),
    "metadata": ("tests/packages/test_versions.py",),
    "capture by Dynamo": (
        "tests/capture/test_attributes.py",
        "tests/capture/test_capture.py",
        "tests/capture/test_contents.py",
        "tests/capture/test_dynamo.py",
        "tests/capture/test_randomness.py",
    ),
    "capture by dispatch": ("tests/capture/test_dispatch.py", "tests/end_to_end/test_dispatch_on_ranks.py"),
    "functions that users compiled": ("tests/capture/test_compiled_parts.py",),
    "an object per matrix": ("tests/end_to_end/test_one_per_matrix.py",),
    "bits of operators": ("tests/ir/test_bit_exactness.py", "tests/lowering/test_batch_graph.py"),
    "graphs and their text": ("tests/ir/test_fx_utils.py", "tests/ir/test_printer.py", "tests/ir/test_verifier.py"),
    "passes": (
        "tests/passes/test_factorizations.py",
        "tests/passes/test_planning_passes.py",
        "tests/passes/test_symmetry.py",
    ),
    "layouts on ranks: FSDP2, TP, DDP, HSDP": (
        "tests/end_to_end/test_counts.py",
        "tests/end_to_end/test_parity.py",
        "tests/end_to_end/test_training.py",
    ),
    "ZeRO-1": (
        "tests/data_parallel/test_bits.py",
        "tests/data_parallel/test_checkpoints.py",
        "tests/data_parallel/test_phases.py",
    ),
    "a step that goes wrong": ("tests/session/test_ranks_that_differ.py", "tests/session/test_odd_input.py"),
    "steps, variants and programs": (
        "tests/session/test_program_cache.py",
        "tests/session/test_step_driver.py",
        "tests/session/test_variants.py",
    ),
    "checkpoints": ("tests/session/test_checkpoints.py", "tests/session/test_checkpoints_fresh.py"),
    "plan files": ("tests/session/test_planned_runs.py", "tests/tools/test_plan_command.py"),
    "Triton's kernels in its interpreter": (
        "tests/kernels/test_gemm_axpby.py",
        "tests/kernels/test_memory.py",
        "tests/kernels/test_sym_gemm.py",
    ),
    "operators of our own": ("tests/kernels/test_operators.py",),
    "Triton's kernels compiled for a GPU": ("tests/kernels/test_ahead.py",),
    "generated kernels": (
        "tests/codegen/test_codegen.py",
        "tests/lowering/test_elementwise_kernels.py",
        "tests/lowering/test_elementwise_kernels_on_ranks.py",
    ),
    "streams, recordings and process groups": (
        "tests/lowering/test_stream_sync.py",
        "tests/runtime/test_buffers.py",
        "tests/runtime/test_cuda_graph.py",
        "tests/runtime/test_graph_recorder.py",
        "tests/runtime/test_process_groups.py",
    ),
    "the stand-in for a GPU": ("tests/fake_cuda/test_trainings.py",),
    "rates of hardware": ("tests/machine",),
    "fragments, pieces and slices": ("tests/views",),
    "what users call": ("tests/api", "tests/clients/test_copies.py", "tests/clients/test_schedulers.py"),
    "tools": ("tests/report/test_explain.py", "tests/tools/test_processes.py", "tests/tools/test_verification.py"),
}


def arguments() -> list[str]:
    """The files and functions, each once."""
    return list(dict.fromkeys(name for names in CORE.values() for name in names))


if __name__ == "__main__":
    print("\n".join(arguments()))
