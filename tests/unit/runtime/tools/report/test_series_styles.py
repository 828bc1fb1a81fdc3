"""Styles: every name has one, no two of a table look alike, with any colour vision."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.lines import Line2D

from predictors.registry import KINDS
from runtime.policy.eviction.registry import EVICTIONS
from runtime.presets import choice_names
from runtime.tools.report.series_styles import HUES, STYLES, line_style, series_style

VARIANTS = ("-one-by-one", "-at-once")
SYSTEMS = [name for name in choice_names("system") if not name.endswith(VARIANTS)]
NO_OWN_HUE = {"first-layers", "regret"}
"""Eviction policies that no figure compares, or that have the hue of the one that they replace
(`reuse`) with another marker and dashes."""
TABLES = [list(KINDS), sorted(EVICTIONS.keys() - NO_OWN_HUE), SYSTEMS]

# Linear RGB as seen without red or without green cones (Machado et al. 2009, severity 1).
PROTANOPIA = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
DEUTERANOPIA = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
CONES = {"all": np.eye(3), "protanopia": PROTANOPIA, "deuteranopia": DEUTERANOPIA}


TO_XYZ = np.array([[0.412, 0.358, 0.180], [0.213, 0.715, 0.072], [0.019, 0.119, 0.950]])


def lab(color: str, cones: str) -> np.ndarray:
    """CIELAB of a colour `#rrggbb` as an eye with these cones sees it."""
    share = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    ratio = TO_XYZ @ np.clip(CONES[cones] @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    root = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("names", TABLES, ids=["predictors", "evictions", "systems"])
def test_markers__tell_the_names_of_a_table_apart(names: list[str]) -> None:
    assert len({STYLES[name].marker for name in names}) == len(names)


@pytest.mark.parametrize("name", STYLES)
def test_styles__are_lines_that_can_be_drawn(name: str) -> None:
    Line2D([0, 1], [0, 1], **line_style(name))


@pytest.mark.parametrize("cones", CONES)
@pytest.mark.parametrize("names", TABLES, ids=["predictors", "evictions", "systems"])
def test_colors__differ_for_eyes_of_every_sort(names: list[str], cones: str) -> None:
    for one, other in combinations(names, 2):
        first, second = (lab(STYLES[name].color, cones) for name in (one, other))
        assert np.linalg.norm(first - second) > (20 if cones == "all" else 10), (one, other)


def test_regret__differs_from_reuse_without_a_hue_of_its_own() -> None:
    markers = [style.marker for name, style in STYLES.items() if name in EVICTIONS]
    assert markers.count(STYLES["regret"].marker) == 1
    assert STYLES["regret"].dashes != STYLES["reuse"].dashes


def test_colors__differ_from_the_background() -> None:
    surface = "#ffffff"  # as figure.mplstyle has it
    for hue, color in HUES.items():
        assert np.linalg.norm(lab(color, "all") - lab(surface, "all")) > 30, hue
    assert len(set(HUES.values())) == len(HUES)


def test_series_style__variants_have_the_hue_of_their_name() -> None:
    assert series_style("oracle (simulated)") == STYLES["oracle"]
    assert series_style("skip, 1 ahead") == STYLES["skip"]
    for variant in ("skip-2", "skip-3", "skip, 2 ahead", "skip without anything"):
        style = series_style(variant)
        assert style.hue == STYLES["skip"].hue
        assert (style.marker, style.dashes) != (STYLES["skip"].marker, STYLES["skip"].dashes)
    for variant in VARIANTS:
        assert series_style(f"fmoe{variant}").hue == STYLES["fmoe"].hue
    assert series_style("skip-2") == series_style("skip, 2 ahead")
    own = line_style("my-own")
    assert (own["color"], own["marker"]) == (HUES["navy"], "P"), "the same in every process"
