from __future__ import annotations

from lachesis_actors.engine_log import CAUSES, LAST, cause

WORKER = "(Worker pid=7) ERROR 12-01 04:19:36 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=6) ERROR 12-01 04:19:37 [core.py:1510] "
SERVER = "(APIServer pid=5) "

TOO_LITTLE_MEMORY = f"""\
{SERVER}WARNING 12-01 04:19:16 [system_utils.py:255] This can cause errors like `OSError: [Errno 24]`.
{WORKER}WorkerProc hit an exception.
{WORKER}Traceback (most recent call last):
{WORKER}  File "vllm/v1/worker/cpu_worker.py", line 219, in determine_available_memory
{WORKER}    raise ValueError(
{WORKER}ValueError: Available memory is less than requested (8.0 GiB).
{WORKER}Traceback (most recent call last):
{WORKER}ValueError: Available memory is less than requested (8.0 GiB).
{WORKER}
{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}  File "vllm/v1/engine/core.py", line 1482, in run_engine_core
{CORE}                  ^^^^^^^^^^^^^^^^^
{CORE}RuntimeError: Worker failed, see above
Process EngineCore:
Traceback (most recent call last):
  File "multiprocessing/process.py", line 314, in _bootstrap
RuntimeError: Worker failed, see above
{SERVER}Traceback (most recent call last):
{SERVER}  File "vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
{SERVER}RuntimeError: Engine core initialization failed. See root cause above.
resource_tracker.py:254: UserWarning: There appear to be 1 leaked shared_memory objects
  warnings.warn('resource_tracker: There appear to be %d '
"""

TOO_LONG = """\
Traceback (most recent call last):
  File "pydantic/_internal/_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len
"""


def test_each_error_once_and_no_frames(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(TOO_LITTLE_MEMORY)
    assert cause(log).splitlines() == [
        "WorkerProc hit an exception.",
        "ValueError: Available memory is less than requested (8.0 GiB).",
        "EngineCore failed to start.",
        "RuntimeError: Worker failed, see above",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]


def test_an_error_of_several_lines_is_whole_and_earlier_starts_do_not_count(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(TOO_LITTLE_MEMORY)
    before = log.stat().st_size
    assert cause(log, since=before) == "(nothing)"
    with log.open("a") as file:
        file.write(TOO_LONG)
    assert cause(log, since=before).splitlines() == [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len",
    ]


def test_without_an_error_the_last_lines_and_never_many(tmp_path):
    log = tmp_path / "vllm.log"
    assert cause(log) == "(nothing)"
    log.write_text("".join(f"line {n}\n" for n in range(50)))
    assert cause(log).splitlines() == [f"line {n}" for n in range(50 - LAST, 50)]
    log.write_text("".join(f"OSError: {n}\n" for n in range(50)))
    assert cause(log).splitlines() == [f"OSError: {n}" for n in range(50 - CAUSES, 50)]
