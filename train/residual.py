"""The networks behind `residual`: for each source the target layers' routers, and a correction.

    state   = (1 - decay) * norm(x) @ P                      for each decay
    token   = norm(first layer's input) @ Q                  the same for all sources
    hidden  = relu(norm(x) @ W + context @ V + token @ Z + b)
    logits  = x @ R + hidden @ U + c                         for every target at once
    chance  = sigmoid(scale * log_softmax(logits) + shift)

The context is the decaying sum of the request's earlier states, a stand-in for attention's output.
R is initialised with the routers, U and c with zeros: untrained, this is skip. All of it learns.

The loss is the cross-entropy with the softmax of the logits that the target's router really had
(its weights on its own input, both known): 60 numbers say more about a ranking than the four that
were chosen. Against the chosen set alone the same networks stay 3 to 6 points behind.

Shape suffixes: N sources, B batch, D hidden size, G decays, R context for each, Q token, F width,
H targets, E experts, O = H E, X figures.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from collect.traces import TraceSignal
from predictors.base import Floats, Predictor, Signal
from predictors.residual import (
    FIRST_SOURCE,
    ForecastSource,
    ResidualPredictor,
    gate_sources,
    layer_input_sources,
)
from predictors.spec import ModelSpec
from train.calibration import platt
from train.data import Batch, InputSpec, merge_inputs
from train.export import residual_graph
from train.networks import SMALLEST_SCALE, top_k_hits, uniform
from train.predictor_stack import PredictorStack, ReferenceScores

KIND = "residual"
DECAYS = (0.0, 0.8)
"""The token before, and the dozen before it."""
RANK = 32
"""Numbers that sum up a request's past for one source and decay."""
TOKEN_SIZE = 64
"""Numbers that say which token it is."""
CALIBRATION_BATCHES = 32
"""Two numbers a forecast are soon known."""


class SourceStack(nn.Module):
    """Sources with the same number of targets, as one stack of products; part of a family."""

    mean_ND: Tensor
    deviation_ND: Tensor
    teacher_LED: Tensor
    scale_NH: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        sources: Sequence[ForecastSource],
        routers_LED: Floats,
        biases_LE: Floats | None,
        *,
        horizons: int,
        width: int,
        rank: int = RANK,
        decays: tuple[float, ...] = DECAYS,
    ):
        super().__init__()
        self.spec, self.sources = spec, list(sources)
        self.horizons, self.decays = horizons, decays
        targets = [list(source.targets(spec.num_layers, horizons)) for source in sources]
        self.num_targets = max(map(len, targets))
        # Sources near the top have fewer targets: the rest of their stack repeats the last one.
        padded = [layers + [layers[-1]] * (self.num_targets - len(layers)) for layers in targets]
        self.targets_NH = torch.tensor(padded)
        self._used = [(n, h) for n, layers in enumerate(targets) for h in range(len(layers))]
        self.labels = [
            f"{KIND}/{group(self.sources[n], h)}/layer_{targets[n][h]:02d}" for n, h in self._used
        ]
        self.needs = InputSpec(
            frozenset(TraceSignal(str(source.signal)) for source in sources), decays
        )
        num, hidden, experts = len(self.sources), spec.hidden_size, spec.num_experts
        outputs = self.num_targets * experts
        self.weight_in_NDF = nn.Parameter(uniform(num, hidden, width, inputs=hidden))
        self.bias_in_NF = nn.Parameter(torch.zeros(num, width))
        groups = len(decays)
        self.to_state_NGDR = nn.Parameter(
            torch.randn(num, groups, hidden, rank) / math.sqrt(hidden)
        )
        self.weight_past_NRF = nn.Parameter(uniform(num, groups * rank, width, inputs=hidden))
        self.weight_token_NQF = nn.Parameter(uniform(num, TOKEN_SIZE, width, inputs=hidden))
        self.weight_out_NFO = nn.Parameter(torch.zeros(num, width, outputs))
        teacher = torch.from_numpy(routers_LED).float()
        bias = torch.zeros(spec.num_layers, experts)
        if biases_LE is not None:
            bias = torch.from_numpy(biases_LE).float()
        routers_NHED = teacher[self.targets_NH]
        self.router_NDO = nn.Parameter(routers_NHED.flatten(1, 2).transpose(1, 2).contiguous())
        self.bias_out_NO = nn.Parameter(bias[self.targets_NH].flatten(1))
        self.register_buffer("teacher_LED", teacher)
        self.register_buffer("teacher_bias_LE", bias)
        self.register_buffer("mean_ND", torch.zeros(num, hidden))
        self.register_buffer("deviation_ND", torch.ones(num, hidden))
        self.register_buffer("scale_NH", torch.ones(num, self.num_targets))
        self.register_buffer("shift_NH", torch.full((num, self.num_targets), math.log(spec.top_k)))

    # ---- inputs

    def _pick(self, states: Mapping[TraceSignal, Tensor]) -> Tensor:
        """`[N, B, D]`: each source's own signal and layer."""
        return torch.stack([states[TraceSignal(str(s.signal))][s.layer] for s in self.sources])

    def _pick_past(self, contexts: Mapping[TraceSignal, Tensor]) -> Tensor:
        """`[N, G, B, D]`."""
        picked = [contexts[TraceSignal(str(s.signal))][:, s.layer] for s in self.sources]
        return torch.stack(picked)

    def normalise_by(self, batch: Batch) -> None:
        states_NBD = self._pick(batch.states)
        self.mean_ND.copy_(states_NBD.mean(1))
        self.deviation_ND.copy_(states_NBD.std(1).clamp(min=SMALLEST_SCALE))

    # ---- products

    def forward(self, batch: Batch, token_BQ: Tensor) -> Tensor:
        """Logits `[N, B, H, E]`; without contexts each token is its request's first."""
        states_NBD = self._pick(batch.states)
        normal_NBD = (states_NBD - self.mean_ND[:, None]) / self.deviation_ND[:, None]
        summed_NBF = torch.baddbmm(self.bias_in_NF[:, None], normal_NBD, self.weight_in_NDF)
        summed_NBF = summed_NBF + token_BQ @ self.weight_token_NQF
        if batch.contexts:
            assert batch.weight_GB is not None
            past_NGBD = self._pick_past(batch.contexts)
            past_NGBD = past_NGBD - batch.weight_GB[..., None] * self.mean_ND[:, None, None]
            past_NGBD = past_NGBD / self.deviation_ND[:, None, None]
            context_NBR = (past_NGBD @ self.to_state_NGDR).transpose(1, 2).flatten(2)
            summed_NBF = torch.baddbmm(summed_NBF, context_NBR, self.weight_past_NRF)
        logits_NBO = torch.baddbmm(self.bias_out_NO[:, None], states_NBD, self.router_NDO)
        logits_NBO = torch.baddbmm(logits_NBO, summed_NBF.relu(), self.weight_out_NFO)
        return logits_NBO.unflatten(-1, (self.num_targets, self.spec.num_experts))

    def _used_of(self, values_NBHE: Tensor) -> Tensor:
        """`[X, B, E]`: without the repeated targets."""
        return torch.stack([values_NBHE[n, :, h] for n, h in self._used])

    def _targets(self) -> Tensor:
        return torch.stack([self.targets_NH[n, h] for n, h in self._used])

    def losses(self, batch: Batch, token_BQ: Tensor) -> Tensor:
        with torch.no_grad():
            truth_LBE = torch.baddbmm(
                self.teacher_bias_LE[:, None], batch.gate_LBD, self.teacher_LED.transpose(1, 2)
            ).softmax(-1)
        logits_XBE = self._used_of(self(batch, token_BQ))
        wanted_XBE = truth_LBE[self._targets()]
        return (logits_XBE.logsumexp(-1) - (wanted_XBE * logits_XBE).sum(-1)).mean(-1)

    def hits(self, batch: Batch, token_BQ: Tensor) -> tuple[Tensor, Tensor]:
        chosen_XBK = batch.chosen_LBK[self._targets()]
        found_X = top_k_hits(self._used_of(self(batch, token_BQ)), chosen_XBK)
        return found_X, torch.full_like(found_X, chosen_XBK[0].numel())

    @torch.no_grad()
    def calibrate(self, batches: Iterable[tuple[Batch, Tensor]]) -> None:
        """Scale and shift of every forecast."""
        logits, chosen = [], []
        for batch, token_BQ in batches:
            logits.append(self._used_of(self(batch, token_BQ)))
            chosen.append(batch.chosen_LBK[self._targets()])
        whole_XNE, chosen_XNK = torch.cat(logits, 1), torch.cat(chosen, 1)
        for f, (n, h) in enumerate(self._used):
            scale, shift = platt(whole_XNE[f : f + 1], chosen_XNK[f : f + 1])
            self.scale_NH[n, h], self.shift_NH[n, h] = scale[0], shift[0]

    @torch.no_grad()
    def answers(self, batch: Batch, token_BQ: Tensor) -> Iterator[ReferenceScores]:
        z_NBHE = self(batch, token_BQ).log_softmax(-1)
        scores_NBHE = self.scale_NH[:, None, :, None] * z_NBHE + self.shift_NH[:, None, :, None]
        for n, h in self._used:
            source = self.sources[n]
            scores_BE = scores_NBHE[n, :, h].sigmoid().cpu().numpy()
            yield ReferenceScores(
                KIND, source.signal, source.layer, int(self.targets_NH[n, h]), scores_BE
            )

    def _graph(self, number: int, token: Mapping[str, Tensor]) -> bytes:
        """One source's graph: normalisation folded in, unused targets cut off.

        `token`: what makes the token's numbers of the first layer's input, `token_out [D, Q]` and
        `token_out_bias`.
        """
        source = self.sources[number]
        num_targets = len(source.targets(self.spec.num_layers, self.horizons))
        outputs = num_targets * self.spec.num_experts
        inverse_D1 = self.deviation_ND[number].double().reciprocal()[:, None]
        mean_D = self.mean_ND[number].double()
        share_G11 = 1 - torch.tensor(self.decays, dtype=torch.double)[:, None, None]
        state_GDR = inverse_D1 * self.to_state_NGDR[number].double() * share_G11
        state_DR = state_GDR.transpose(0, 1).flatten(1)
        in_DF = inverse_D1 * self.weight_in_NDF[number].double()
        in_bias_F = self.bias_in_NF[number].double() - mean_D @ in_DF
        token_QF = self.weight_token_NQF[number].double()
        weights = {
            "state": state_DR,
            "state_bias": -mean_D @ state_DR,
            "in": in_DF,
            "in_bias": in_bias_F,
            "router": self.router_NDO[number, :, :outputs],
            "out_bias": self.bias_out_NO[number, :outputs],
            "memory": torch.cat([self.weight_past_NRF[number].double(), token_QF]),
            "out": self.weight_out_NFO[number, :, :outputs],
            "scale": self.scale_NH[number, :num_targets, None],
            "shift": self.shift_NH[number, :num_targets, None],
        }
        if source == FIRST_SOURCE:
            # The token is its own hidden state: what is made of it is part of the first product.
            weights["in"] = in_DF + token["token_out"] @ token_QF
            weights["in_bias"] = in_bias_F + token["token_out_bias"] @ token_QF
            weights |= {"memory": self.weight_past_NRF[number], **token}
        arrays = {key: value.float().cpu().numpy() for key, value in weights.items()}
        name = f"{KIND}_{source.signal}_{source.layer}"
        normaliser = (self.mean_ND[number].cpu().numpy(), self.deviation_ND[number].cpu().numpy())
        return residual_graph(arrays, num_targets=num_targets, name=name, normaliser=normaliser)

    @torch.no_grad()
    def graphs(self, token: Mapping[str, Tensor]) -> dict[ForecastSource, bytes]:
        return {source: self._graph(n, token) for n, source in enumerate(self.sources)}


def group(source: ForecastSource, place: int) -> str:
    """Returns the group in which the source's target number `place` is averaged.

    It is the horizon, or `entry` for forecasts from the first layer's input.
    """
    if source.signal is Signal.GATE_INPUT:
        return f"horizon_{place + 1}"
    return "horizon_0" if source.layer else "entry"


class ResidualStack(PredictorStack):
    """The sources that look ahead, and those of horizon 0, which have one target each."""

    lr_share = 0.5
    token_mean_D: Tensor
    token_deviation_D: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        routers_LED: Floats,
        biases_LE: Floats | None,
        *,
        horizons: int,
        width: int,
        rank: int = RANK,
        decays: tuple[float, ...] = DECAYS,
    ):
        super().__init__()
        self.horizons, self.decays = horizons, decays
        hidden = spec.hidden_size
        self.token_DQ = nn.Parameter(torch.randn(hidden, TOKEN_SIZE) / math.sqrt(hidden))
        self.register_buffer("token_mean_D", torch.zeros(hidden))
        self.register_buffer("token_deviation_D", torch.ones(hidden))
        groups = [gate_sources(spec.num_layers), layer_input_sources(spec.num_layers)]
        self.stacks = nn.ModuleList(
            SourceStack(
                spec,
                sources,
                routers_LED,
                biases_LE,
                horizons=horizons,
                # One target instead of three, and an easy one.
                width=width if sources is groups[0] else max(1, width // 2),
                rank=rank,
                decays=decays,
            )
            for sources in groups
            if sources
        )
        self.labels = [label for stack in self.stacks for label in stack.labels]
        self.needs = merge_inputs([stack.needs for stack in self.stacks])

    def normalise_by(self, batch: Batch) -> None:
        first_BD = batch.states[TraceSignal.LAYER_INPUT][0]
        self.token_mean_D.copy_(first_BD.mean(0))
        self.token_deviation_D.copy_(first_BD.std(0).clamp(min=SMALLEST_SCALE))
        for stack in self.stacks:
            stack.normalise_by(batch)

    def _token(self, batch: Batch) -> Tensor:
        """Returns the normalised token as a query, `[B, Q]`."""
        first_BD = batch.states[TraceSignal.LAYER_INPUT][0]
        return (first_BD - self.token_mean_D) / self.token_deviation_D @ self.token_DQ

    def losses(self, batch: Batch) -> Tensor:
        token_BQ = self._token(batch)
        return torch.cat([stack.losses(batch, token_BQ) for stack in self.stacks])

    def hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        token_BQ = self._token(batch)
        hits, counts = zip(*(stack.hits(batch, token_BQ) for stack in self.stacks), strict=True)
        return torch.cat(hits), torch.cat(counts)

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch]) -> None:
        sample = [(batch, self._token(batch)) for batch in islice(batches, CALIBRATION_BATCHES)]
        for stack in self.stacks:
            stack.calibrate(sample)

    @torch.no_grad()
    def export(self, spec: ModelSpec) -> Mapping[str, Predictor]:
        out_DQ = (self.token_DQ / self.token_deviation_D[:, None]).double()
        token = {"token_out": out_DQ, "token_out_bias": -self.token_mean_D.double() @ out_DQ}
        graphs: dict[ForecastSource, bytes] = {}
        for stack in self.stacks:
            graphs |= stack.graphs(token)
        return {KIND: ResidualPredictor(spec, graphs, horizons=self.horizons, decays=self.decays)}

    @torch.no_grad()
    def answers(self, batch: Batch) -> Iterator[ReferenceScores]:
        token_BQ = self._token(batch)
        for stack in self.stacks:
            yield from stack.answers(batch, token_BQ)
