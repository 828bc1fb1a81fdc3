"""`--help` says what there is, quickly: the slow libraries stay unimported."""

import json

from configs.commands import PROGRAMS
from tests.builders.processes import run_python
from tests.builders.sources import HEAVY

PROBE = """
import json, sys
import configs.program, moecast.command
from benchmarks.__main__ import COMMANDS
from configs.cli import main
from configs.commands import PROGRAMS
codes = []
for program, commands in {**PROGRAMS, "benchmarks": COMMANDS}.items():
    codes.append(main(program, commands, ["--help"]))
    for command in commands:
        arguments = [one for one in (command.name, "--help", "all") if one]
        codes.append(main(program, commands, arguments))
print(json.dumps({"codes": codes, "modules": sorted({one.split(".")[0] for one in sys.modules})}))
"""


def test_help__imports_nothing_slow() -> None:
    *text, last = run_python("-c", PROBE).stdout.splitlines()
    report = json.loads(last)
    assert set(report["codes"]) == {0}
    assert not HEAVY & set(report["modules"])
    for program in (*PROGRAMS, "benchmarks"):
        assert any(line.startswith(f"usage: python -m {program}") for line in text)
    assert any("run_dir" in line for line in text)
