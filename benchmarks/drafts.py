"""`python -m benchmarks drafts`: decoding with drafted tokens over decoding without, by prompts.

One model is served; for each prompt, answers with and without drafts take turns, so that ratios
hold on a machine whose speed varies. How fast drafts could be is measured with drafts that are
always right: the tokens of the answer without.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from benchmarks.config import DraftsConfig
from benchmarks.reports import describe_machine, print_line, write_report
from runtime.engine.memory import freeze_objects
from runtime.generation.drafting import Draft, DraftPace, decode_with, look_up
from runtime.generation.loading import load
from runtime.generation.sampling import listen_to_tokens
from runtime.hf.tokens import load_tokenizer

RIGHT_DRAFTS = (1, 2, 4, 8)
"""Drafted tokens of the steps that show how fast drafts could be."""


@dataclass(frozen=True, kw_only=True)
class DraftsRow:
    """Prompts of one kind."""

    kind: str
    prompts: int
    speed: float
    """Decoding time of all answers without drafts over that with them."""
    lowest: float
    """The same for the prompt that gains least."""
    highest: float
    tokens_per_step: float
    """Tokens of a step with drafts; steps of one token count."""
    accepted: float | None
    """Share of the drafted tokens that were accepted."""
    same_tokens: int
    """Answers with drafts that equal those without."""


@dataclass(frozen=True, kw_only=True)
class RightDraftsRow:
    """Drafts of a fixed number of tokens, all of which are accepted."""

    drafted: int
    step_seconds: float
    """Median over the answers of a step's mean time."""
    speed: float
    """Median over the answers of the decoding time without drafts over that with them."""


@dataclass(frozen=True)
class DraftedAnswer:
    tokens: list[int]
    seconds: float
    """From the first token to the last."""
    steps: int
    drafted: int
    accepted: int


def know(text: list[int], _config: GenerationConfig) -> Draft:
    """Drafts the tokens of an answer that is known."""

    def draft(tokens_1T: Tensor, count: int) -> Tensor:
        return torch.tensor([text[: tokens_1T.shape[1] + count]])

    return draft


class FixedPace(DraftPace):
    """Drafts as many tokens in each step."""

    def __init__(self, count: int):
        super().__init__(plain_seconds=1.0)
        self._count = count

    def choose(self, available: int) -> int:
        return min(self._count, available)


def answer(
    model: PreTrainedModel,
    prompt: list[int],
    *,
    new_tokens: int,
    pace: DraftPace | None,
    source: Callable[[GenerationConfig], Draft] = look_up,
) -> DraftedAnswer:
    """Generates greedily, with drafts if there is a pace."""
    times: list[float] = []
    tokens: list[int] = []
    before = (0, 0) if pace is None else (pace.num_drafted, pace.num_accepted)

    def on_token(token: int) -> bool:
        times.append(time.perf_counter())
        tokens.append(token)
        return False

    inputs = torch.tensor([prompt])
    drafting = {} if pace is None else {"custom_generate": decode_with(source, pace)}
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=new_tokens,
        # Every answer has the same number of tokens.
        eos_token_id=model.config.get_text_config().vocab_size,
        pad_token_id=0,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([listen_to_tokens(on_token)]),
        **drafting,
    )
    drafted, accepted = (0, 0) if pace is None else (pace.num_drafted, pace.num_accepted)
    accepted -= before[1]
    steps = len(tokens) - 1 - accepted
    return DraftedAnswer(tokens, times[-1] - times[0], steps, drafted - before[0], accepted)


def read_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase, config: DraftsConfig
) -> list[list[int]]:
    """Returns the beginnings of the first prompts of a JSON-lines file."""
    with path.open() as lines:
        texts = [json.loads(line)["prompt"] for line in itertools.islice(lines, config.prompts)]
    return [tokenizer(text)["input_ids"][: config.prompt_tokens] for text in texts]


def measure(
    kind: str, model: PreTrainedModel, prompts: list[list[int]], config: DraftsConfig
) -> DraftsRow:
    """Returns the row of one kind of prompts; answers learn from those before, as in `serve`."""
    pace = DraftPace()
    plain_seconds, draft_seconds, speeds, drafted_answers, same = 0.0, 0.0, [], [], 0
    for prompt in prompts:
        pairs = []
        # Finds the experts of the prompt in memory, as all measured answers do.
        answer(model, prompt, new_tokens=config.new_tokens, pace=None)
        for turn in range(config.repetitions):
            plain_first = turn % 2 == 0
            first, second = (
                answer(model, prompt, new_tokens=config.new_tokens, pace=side_pace)
                for side_pace in ((None, pace) if plain_first else (pace, None))
            )
            plain, fast = (first, second) if plain_first else (second, first)
            pairs.append((plain, fast))
            drafted_answers.append(fast)
            same += plain.tokens == fast.tokens
        seconds = [
            statistics.median(run.seconds for run in side) for side in zip(*pairs, strict=True)
        ]
        plain_seconds += seconds[0]
        draft_seconds += seconds[1]
        speeds.append(seconds[0] / seconds[1])
    drafted = sum(run.drafted for run in drafted_answers)
    row = DraftsRow(
        kind=kind,
        prompts=len(prompts),
        speed=plain_seconds / draft_seconds,
        lowest=min(speeds),
        highest=max(speeds),
        tokens_per_step=sum(len(run.tokens) - 1 for run in drafted_answers)
        / sum(run.steps for run in drafted_answers),
        accepted=sum(run.accepted for run in drafted_answers) / drafted if drafted else None,
        same_tokens=same,
    )
    print_line(
        f"{kind:14} {row.speed:.2f}x ({row.lowest:.2f} to {row.highest:.2f}), "
        f"{row.tokens_per_step:.2f} tokens a step, accepted {row.accepted or 0:.0%}, "
        f"{same} of {len(drafted_answers)} answers the same"
    )
    return row


def measure_right_drafts(
    model: PreTrainedModel, prompts: list[list[int]], config: DraftsConfig
) -> list[RightDraftsRow]:
    """Returns a row for each number of drafted tokens; nothing is rejected."""
    steps: dict[int, list[float]] = {0: [], **{count: [] for count in RIGHT_DRAFTS}}
    speeds: dict[int, list[float]] = {count: [] for count in steps}
    for prompt in prompts:
        plain = answer(model, prompt, new_tokens=config.new_tokens, pace=None)
        for count in steps:
            one = answer(
                model,
                prompt,
                new_tokens=config.new_tokens,
                pace=FixedPace(count) if count else None,
                source=partial(know, [*prompt, *plain.tokens]),
            )
            steps[count].append(one.seconds / one.steps)
            speeds[count].append(plain.seconds / one.seconds)
    rows = [
        RightDraftsRow(
            drafted=count,
            step_seconds=statistics.median(steps[count]),
            speed=statistics.median(speeds[count]),
        )
        for count in steps
    ]
    for row in rows:
        print_line(
            f"{row.drafted} drafted, all right: {1000 * row.step_seconds:.0f} ms a step, "
            f"{row.speed:.2f}x"
        )
    return rows


def run_drafts(config: DraftsConfig) -> None:
    """Measures every kind of prompts on one served model."""
    machine = describe_machine(config.threads)
    torch.set_num_threads(config.threads)
    model = load(config.model, budget=config.budget, system=config.system)
    with model.moecast as handle:
        tokenizer = load_tokenizer(handle.folder)
        freeze_objects()
        rows, all_prompts = [], []
        for kind, path in config.kinds.items():
            prompts = read_prompts(path, tokenizer, config)
            all_prompts += prompts
            answer(model, prompts[0], new_tokens=8, pace=None)  # warms up
            rows.append(measure(kind, model, prompts, config))
        right = measure_right_drafts(model, all_prompts, config)
    write_report(config, machine=machine, rows=rows, right=right)
