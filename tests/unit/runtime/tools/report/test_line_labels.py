"""Names at the ends of lines: next to their lines, and never over each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from runtime.tools.report.figures import LIGHT, use_scheme
from runtime.tools.report.line_labels import draw_lines, label_lines, spread

HEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=14)


@given(HEIGHTS)
def test_spread__keeps_the_order_and_the_distance(heights: list[float]) -> None:
    gap = 0.06
    placed = spread(heights, gap)
    order = np.argsort(heights, kind="stable")
    assert np.all(np.diff(np.array(placed)[order]) > gap - 1e-9)
    assert min(placed) > -1e-9
    assert max(placed) < 1 + 1e-9


def test_spread__moves_only_what_is_too_close() -> None:
    assert spread([0.9, 0.1, 0.5], 0.1) == pytest.approx([0.9, 0.1, 0.5])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert spread([0.0, 0.0], 0.1) == pytest.approx([0.0, 0.1])


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_label_lines__names_do_not_overlap(scale: str) -> None:
    with use_scheme(LIGHT):
        figure = Figure(figsize=(8, 4))
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set_yscale(scale)
        series = {f"name {place}": ([0, 1], [5.0, 1.0 + place / 50]) for place in range(12)}
        draw_lines(axes, {**series, "gap": ([0, 1], [3.0, None])})
        label_lines(axes, texts={"name 3": "another"})
        canvas.draw()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text()}
    assert set(boxes) == {f"name {place}" for place in range(12) if place != 3} | {"another", "gap"}
    names = list(boxes)
    for place, name in enumerate(names):
        assert boxes[name].x0 > axes.get_window_extent().x1
        assert not any(boxes[name].overlaps(boxes[other]) for other in names[place + 1 :])
