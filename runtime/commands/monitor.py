"""`moecast monitor`: write the files with which Prometheus and Grafana watch servers."""

from typing import Any

from predictors.errors import MoecastError
from predictors.files import expand_home, write_atomic
from runtime.commands.progress import print_line
from runtime.serving.config import MonitorConfig
from runtime.serving.monitoring import DASHBOARD, FILES, FOLDER, SCRAPING


def run(config: MonitorConfig) -> dict[str, Any]:
    """Copy the files and print what to do with them."""
    output = expand_home(config.output)
    for name in FILES:
        # The user may have changed its thresholds.
        if (output / name).exists():
            raise MoecastError(f"{output / name} exists; remove it or give another output=PATH")
    for name in FILES:
        write_atomic(output / name, (FOLDER / name).read_bytes())
    text = (
        f"prometheus --config.file={output / SCRAPING}\n"
        f"Grafana: Dashboards > New > Import > {output / DASHBOARD}"
    )
    print_line(text)
    return {"files": [str(output / name) for name in FILES]}
