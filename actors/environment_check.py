"""Whether a run's environments can be made: their files, classes and options, looked at before anything is started.

Atropos takes seconds to import and a file may do anything when it is imported, so that happens in a process of its own
(`python -m lachesis_actors.environment_check`: the configuration as JSON comes in on stdin, the mistakes go out as the
last line of stdout).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config

CHECK_SECONDS = 120.0
"""What importing Atropos and the files of all environments may take."""


def check_environments(config: Config) -> None:
    """Raises ConfigError with a line for each mistake in path and options of an environment of `config`."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lachesis_actors.environment_check"]
    try:
        done = subprocess.run(
            command, input=config.model_dump_json(), env=env, capture_output=True, text=True, timeout=CHECK_SECONDS
        )
    except subprocess.TimeoutExpired:
        paths = ", ".join(environment.path for environment in config.environments)
        text = f"environments: importing {paths} took more than {CHECK_SECONDS:.0f} s, expected less"
        raise ConfigError([text]) from None
    if done.returncode:
        ending = f"status {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        said = done.stderr.strip() or "(nothing)"
        raise ConfigError([f"environments: the process that imported them ended with {ending} and said:\n{said}"])
    if lines := json.loads(done.stdout.splitlines()[-1]):
        raise ConfigError(lines)


def mistakes(config: Config) -> list[str]:
    """A line for each mistake; imports Atropos and every environment's file."""
    from lachesis_actors.environment_loading import check_options, load_environment

    lines: list[str] = []
    for i, environment in enumerate(config.environments):
        key = f"environments.{i}"
        try:
            kind = load_environment(environment.path, key=f"{key}.path")
        except ConfigError as error:
            lines += error.lines
            continue
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            cause = f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
            lines.append(f"{key}.path: value {environment.path!r}, expected a file that can be imported; {cause}")
            continue
        try:
            check_options(kind, environment, config)
        except ConfigError as error:
            lines += error.lines
    return lines


if __name__ == "__main__":
    found = mistakes(Config.model_validate_json(sys.stdin.read()))
    print(f"\n{json.dumps(found)}", flush=True)
    os._exit(0)  # threads that a file has started are nobody's business
