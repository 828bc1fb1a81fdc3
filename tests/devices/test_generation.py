"""Generation of several sequences on a device: in step, in batches, with drafts, and served."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from runtime.config import Exact, ModelConfig, SystemConfig, VerifyModelConfig
from runtime.generation.config import Offload
from runtime.generation.kv_caches import make_offload_factory
from runtime.hf.row_block import SequenceStates
from runtime.hf.sharing import set_shared_reference
from runtime.serving.config import ServeConfig
from runtime.serving.served_model import load_model
from runtime.tools.verify import sides
from runtime.tools.verify.report import compare_budgets
from tests.builders.children import run_in_folder
from tests.builders.lockstep import run_together
from tests.builders.models import plain_eager
from tests.builders.plain_answers import ids, text_of
from tests.builders.served import serving
from tests.builders.serving import running_server
from tests.unit.runtime.generation import test_drafting as drafting

PROMPTS = [[5, 9, 33, 7, 61, 12], [40, 3], [8, 8, 8, 21, 30, 31, 32, 33, 34]]
FEW = {"budget": "30%", "host_budget": "70%", "exact": Exact.EAGER}


def answer(model, prompt: list[int], **options: object) -> list[int]:
    return drafting.answer(model, prompt=prompt, num_tokens=5, **options)


SERVED = {
    "greedy": (Exact.EAGER, {}),
    "sampled": (Exact.EAGER, {"do_sample": True, "top_k": 0}),
    "shared products": (Exact.SHARED, {}),
}


@pytest.mark.parametrize(("exact", "options"), SERVED.values(), ids=SERVED)
def test_group__is_each_sequence_alone(folder, device, exact, options):
    """Alone means in a batch of copies where products are shared."""
    plain, expected = plain_eager(folder).to(device), []
    if exact is Exact.SHARED:
        assert set_shared_reference(plain) is Exact.SHARED
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        expected.append(answer(plain, prompt, **options))
    with serving(folder, device=device, **FEW | {"exact": exact}) as model:
        calls = [partial(answer, model, prompt, **options) for prompt in PROMPTS]
        assert run_together(model, calls) == expected


def test_mask__of_a_window_is_where_the_states_are(device):
    states = torch.zeros(1, 2, 3, 4, device=device)
    assert SequenceStates([states], window=3).make_mask(states).device == device


def test_drafts__change_no_token(folder, device):
    options, pace = {"num_tokens": 8, **drafting.CYCLE}, drafting.EagerPace()
    with serving(folder, device=device, **FEW) as model:
        assert drafting.answer(model, pace, **options) == drafting.answer(model, **options)
    assert pace.num_drafted > 0


OPTIONS = {
    "plain": {"n": 3},
    "caches in host memory": {"n": 3, "kv_budget": "6KiB", "kv_offload": "host"},
    "caches on disk": {"n": 3, "kv_budget": "6KiB", "kv_offload": "disk"},
    "dense weights": {"n": 2, "dense": "stream"},
    "planned": {"n": "auto", "kv_budget": "1MiB"},
}


@cache
def answers_of(folder, device):
    plain = plain_eager(folder).to(device)
    return [answer(plain, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batch__is_each_prompt_alone(folder, device, options):
    expected = answers_of(folder, device)
    with serving(folder, device=device, system="klotski", **FEW) as model:
        found = model.generate_many(PROMPTS, batch_size=1, max_new_tokens=5, **options)
        again = answer(model, PROMPTS[0])
    assert [one.tokens for one in found] == expected
    assert again == expected[0]


def test_caches__in_host_memory_are_pinned(device):
    make = make_offload_factory(Offload.AUTO, device)
    assert make is not None
    place, part_TBHD = make(4), torch.ones(2, 1, 2, 8, device=device)
    place.write(0, part_TBHD)
    assert place.read(2).is_pinned()
    assert torch.equal(place.read(2), part_TBHD.cpu())


def test_server__answers_concurrent_requests_as_alone(speaking, device):
    prompts = ["The sky is", "One, two,", "A river runs"]
    plain = plain_eager(Path(speaking.id)).to(device)
    expected = [text_of(answer(plain, ids(prompt))) for prompt in prompts]
    config = ServeConfig(model=speaking, device=str(device), budget="40%", host_budget="70%")

    def complete(prompt: str) -> str:
        request = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0}
        return server.openai().completions.create(**request).choices[0].text

    with running_server(partial(load_model, config)) as server, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(complete, prompts)) == expected


@pytest.mark.parametrize("exact", [Exact.EAGER, Exact.GROUPED, Exact.SHARED])
@pytest.mark.usefixtures("sim")
def test_verify__finds_no_difference(folder, monkeypatch, exact):
    monkeypatch.setattr(sides, "run_in_child", run_in_folder)
    config = VerifyModelConfig(
        model=ModelConfig(name="tiny", id=str(folder), exact=exact), system=SystemConfig(),
        budget=["20%", "100%"], prompts=["The sky", "One"], max_new_tokens=2, device="sim",
    )  # fmt: skip
    assert compare_budgets(config, advance=lambda _: None).is_equal
