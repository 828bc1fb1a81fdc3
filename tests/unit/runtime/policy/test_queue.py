"""The order of a queue's predicted experts, also while the layers advance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.errors import MoecastError
from runtime.policy.queue import PREFETCH_ORDERS, TransferQueue, find_prefetch_order

LAYERS = 4

REFERENCE = {
    "push-order": lambda _, __: (),
    "nearest-layer": lambda probability, ahead: (ahead, -probability),
    "probability": lambda probability, _: (-probability,),
    "probability-over-distance": lambda probability, ahead: (-probability / ahead,),
    "layer-decay": lambda probability, ahead: (-probability * (1.0 - ahead / LAYERS),),
}
"""`(probability, layers ahead)` to a sort key, straight from the papers."""


def test_find_prefetch_order__names_the_known_ones() -> None:
    with pytest.raises(MoecastError, match="priority 'nearest'.*nearest-layer"):
        find_prefetch_order("nearest")


EXPERTS = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 2))
ACTIONS = st.one_of(
    st.tuples(
        st.just("push_low"), EXPERTS, st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0]))
    ),
    st.tuples(st.sampled_from(["push_high", "remove"]), EXPERTS),
    st.tuples(st.just("remove_low_of_layer"), st.integers(0, LAYERS - 1)),
    st.tuples(st.just("advance"), st.integers(-1, LAYERS - 1)),
)


@given(order=st.sampled_from(sorted(PREFETCH_ORDERS)), actions=st.lists(ACTIONS, max_size=40))
def test_queue__equals_a_list_sorted_at_every_look(order: str, actions: list[tuple]) -> None:
    queue, layer_now = TransferQueue(find_prefetch_order(order), num_layers=LAYERS), -1
    expected: dict[tuple[int, int], float | None] = {}
    high: set[tuple[int, int]] = set()

    def sort_key(expert: tuple[int, int]) -> tuple[float, ...]:
        if expected[expert] is None:
            return (1.0,)
        ahead = expert[0] - layer_now if expert[0] > layer_now else expert[0] - layer_now + LAYERS
        return (0.0, *REFERENCE[order](expected[expert], ahead))

    for name, subject, *probability in actions:
        getattr(queue, name)(subject, *probability)
        match name:
            case "push_low" if subject not in high:
                expected[subject] = probability[0]
            case "push_high":
                expected.pop(subject, None)
                high.add(subject)
            case "remove":
                expected.pop(subject, None)
                high.discard(subject)
            case "remove_low_of_layer":
                expected = {e: p for e, p in expected.items() if e[0] != subject}
            case "advance":
                layer_now = subject
        assert queue.low() == sorted(expected, key=sort_key)
        assert len(queue) == len(expected) + len(high)
