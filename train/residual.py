"""The networks behind `residual`: for each source the target layers' routers, and a correction.

    state   = (1 - decay) * norm(x) @ P                      for each decay
    token   = norm(first layer's input) @ Q                  the same for all sources
    hidden  = relu(norm(x) @ W + context @ V + token @ Z + b)
    low     = norm(x) @ S
    seen    = sum over the chosen experts e of share(e) * low @ A(e)
    logits  = x @ R + hidden @ U + seen + c                  for every target at once
    chance  = sigmoid(scale * log_softmax(logits) + shift)

The context is the decaying sum of the request's earlier states, a stand-in for attention's output;
`seen` stands for what the layer's chosen experts add to the residual stream, each with `top_k`
times its router's probability. The first layer's input has no chosen experts.
R is initialised with the routers, U, A and c with zeros: untrained, this is skip. All of it learns.

On a layer of the reference model, one layer ahead, 5 epochs: .919 with 64 hidden units and nothing
`seen`, .922 and .927 with 256 and 512; .928 with 64 and `seen`, at a third of the weights that a
token reads from a state of 2,048 numbers.

The loss is the cross-entropy with the softmax of the logits that the target's router really had
(its weights on its own input, both known): 60 numbers say more about a ranking than the four that
were chosen. Against the chosen set alone the same networks stay 3 to 6 points behind.

Shape suffixes: L layers, N sources, B batch, D hidden size, G decays, R context for each, Q token,
F width, S low rank, H targets, E experts, O = H E, X figures, K top_k, M pairs of a token
and an expert.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from collect.traces import TraceSignal
from predictors.base import Floats, Predictor, Signal
from predictors.residual import FIRST_SOURCE, ForecastSource, ResidualPredictor, list_sources
from predictors.spec import ModelSpec
from train.data import Batch, InputSpec
from train.export import residual_graph
from train.networks import measure_features, top_k_hits, uniform
from train.predictor_stack import PredictorStack, ReferenceScores

KIND = "residual"
WIDTH = 64
"""Hidden units of a source's network."""
DECAYS = (0.0, 0.8)
"""The token before, and the dozen before it."""
RANK = 32
"""Numbers that sum up a request's past for one source and decay."""
LOW_RANK, MOST_BY_EXPERT = 32, 2 << 20
"""Numbers of a state that each chosen expert's matrix multiplies; fewer where the matrices of all
experts, whose number grows with the square of theirs, would have more weights than that."""
TOKEN_SIZE = 64
"""Numbers that say which token it is."""
CALIBRATION_BATCHES = 32
"""Two numbers a forecast are soon known."""


class ResidualStack(PredictorStack):
    """The networks of all sources as one stack of products."""

    lr_share = 0.5
    mean_ND: Tensor
    deviation_ND: Tensor
    teacher_LED: Tensor
    scale_NH: Tensor
    token_mean_D: Tensor
    token_deviation_D: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        routers_LED: Floats,
        biases_LE: Floats | None,
        *,
        horizons: int,
        width: int = WIDTH,
        rank: int = RANK,
    ):
        super().__init__()
        self.spec, self.sources = spec, list_sources(spec.num_layers)
        self.horizons = horizons
        self.targets = [source.targets(spec.num_layers, horizons) for source in self.sources]
        self.num_targets = max(map(len, self.targets))
        # Sources near the top have fewer targets: the rest of their stack repeats the last one.
        padded = [
            [*layers, *[layers[-1]] * (self.num_targets - len(layers))] for layers in self.targets
        ]
        targets_NH = torch.tensor(padded)
        self._used = [(n, h) for n, layers in enumerate(self.targets) for h in range(len(layers))]
        self._targets_X = [self.targets[n][h] for n, h in self._used]
        self.labels = [
            f"{KIND}/{group(self.sources[n], h)}/layer_{self.targets[n][h]:02d}"
            for n, h in self._used
        ]
        # The router's logits are computed from gate inputs, though a single layer's is no source.
        self.needs = InputSpec(frozenset({FIRST_SOURCE.signal, Signal.GATE_INPUT}), DECAYS)
        num, hidden, experts = len(self.sources), spec.hidden_size, spec.num_experts
        outputs = self.num_targets * experts
        self.weight_in_NDF = nn.Parameter(uniform(num, hidden, width, inputs=hidden))
        self.bias_in_NF = nn.Parameter(torch.zeros(num, width))
        self.token_DQ = nn.Parameter(torch.randn(hidden, TOKEN_SIZE) / math.sqrt(hidden))
        low_rank = max(1, min(LOW_RANK, MOST_BY_EXPERT // (experts * outputs)))
        self.low_NDS = nn.Parameter(torch.randn(num, hidden, low_rank) / math.sqrt(hidden))
        self.by_expert_NESO = nn.Parameter(torch.zeros(num, experts, low_rank, outputs))
        groups = len(DECAYS)
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
        routers_NHED = teacher[targets_NH]
        self.router_NDO = nn.Parameter(routers_NHED.flatten(1, 2).transpose(1, 2).contiguous())
        self.bias_out_NO = nn.Parameter(bias[targets_NH].flatten(1))
        self.register_buffer("teacher_LED", teacher)
        self.register_buffer("teacher_bias_LE", bias)
        self.register_buffer("token_mean_D", torch.zeros(hidden))
        self.register_buffer("token_deviation_D", torch.ones(hidden))
        self.register_buffer("mean_ND", torch.zeros(num, hidden))
        self.register_buffer("deviation_ND", torch.ones(num, hidden))
        self.register_buffer("scale_NH", torch.ones(num, self.num_targets))
        self.register_buffer("shift_NH", torch.full((num, self.num_targets), math.log(spec.top_k)))

    # ---- inputs

    def _pick(self, states: Mapping[str, Tensor]) -> Tensor:
        """Each source's own signal and layer: `[N, B, D]`, of contexts `[N, G, B, D]`."""
        return torch.stack([states[s.signal][..., s.layer, :, :] for s in self.sources])

    def normalise_by(self, batch: Batch) -> None:
        measure_features(self._pick(batch.states), self.mean_ND, self.deviation_ND)
        first_BD = batch.states[TraceSignal.LAYER_INPUT][0]
        measure_features(first_BD, self.token_mean_D, self.token_deviation_D)

    # ---- products

    @torch.no_grad()
    def _router_logits(self, batch: Batch) -> Tensor:
        """`[L, B, E]`: what the model's routers gave."""
        return torch.baddbmm(
            self.teacher_bias_LE[:, None], batch.gate_LBD, self.teacher_LED.transpose(1, 2)
        )

    def _share_chosen(self, batch: Batch, source: ForecastSource, chance_LBE: Tensor) -> Tensor:
        """`[B, E]`, as `predictors.residual.share_chosen`."""
        if source == FIRST_SOURCE:
            return torch.zeros_like(chance_LBE[0])
        # The id E is no choice.
        chance_BE = nn.functional.pad(chance_LBE[source.layer], (0, 1))
        chosen_BK = batch.chosen_LBK[source.layer]
        share_BK = chance_BE.gather(1, chosen_BK) * chosen_BK.size(1)
        return torch.zeros_like(chance_BE).scatter_(1, chosen_BK, share_BK)[:, :-1]

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[N, B, H, E]`; without contexts each token is its request's first."""
        states_NBD = self._pick(batch.states)
        normal_NBD = (states_NBD - self.mean_ND[:, None]) / self.deviation_ND[:, None]
        summed_NBF = torch.baddbmm(self.bias_in_NF[:, None], normal_NBD, self.weight_in_NDF)
        first_BD = batch.states[TraceSignal.LAYER_INPUT][0]
        token_BQ = (first_BD - self.token_mean_D) / self.token_deviation_D @ self.token_DQ
        summed_NBF = summed_NBF + token_BQ @ self.weight_token_NQF
        if batch.contexts:
            assert batch.weight_GB is not None
            past_NGBD = self._pick(batch.contexts)
            past_NGBD = past_NGBD - batch.weight_GB[..., None] * self.mean_ND[:, None, None]
            past_NGBD = past_NGBD / self.deviation_ND[:, None, None]
            context_NBR = (past_NGBD @ self.to_state_NGDR).transpose(1, 2).flatten(2)
            summed_NBF = torch.baddbmm(summed_NBF, context_NBR, self.weight_past_NRF)
        logits_NBO = torch.baddbmm(self.bias_out_NO[:, None], states_NBD, self.router_NDO)
        logits_NBO = torch.baddbmm(logits_NBO, summed_NBF.relu(), self.weight_out_NFO)
        chance_LBE = self._router_logits(batch).softmax(-1)
        shares_NBE = torch.stack([self._share_chosen(batch, s, chance_LBE) for s in self.sources])
        low_NBS = normal_NBD @ self.low_NDS
        seen_NBES = (shares_NBE[..., None] * low_NBS[:, :, None]).flatten(2)
        logits_NBO = torch.baddbmm(logits_NBO, seen_NBES, self.by_expert_NESO.flatten(1, 2))
        return logits_NBO.unflatten(-1, (self.num_targets, self.spec.num_experts))

    def _used_of(self, values_NBHE: Tensor) -> Tensor:
        """`[X, B, E]`: without the repeated targets."""
        return torch.stack([values_NBHE[n, :, h] for n, h in self._used])

    def losses(self, batch: Batch) -> Tensor:
        logits_XBE = self._used_of(self(batch))
        wanted_XBE = self._router_logits(batch).softmax(-1)[self._targets_X]
        return (logits_XBE.logsumexp(-1) - (wanted_XBE * logits_XBE).sum(-1)).mean(-1)

    def hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return top_k_hits(self._used_of(self(batch)), batch.chosen_LBK[self._targets_X])

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Scale and shift of every forecast."""
        logits, chosen = [], []
        for batch in islice(batches, CALIBRATION_BATCHES):
            logits.append(self._used_of(self(batch)))
            chosen.append(batch.chosen_LBK[self._targets_X])
        forecasts = zip(self._used, torch.cat(logits, 1), torch.cat(chosen, 1), strict=True)
        for (n, h), logits_BE, chosen_BK in forecasts:
            self.scale_NH[n, h], self.shift_NH[n, h] = platt(logits_BE, chosen_BK)

    @torch.no_grad()
    def answers(self, batch: Batch) -> Iterator[ReferenceScores]:
        z_NBHE = self(batch).log_softmax(-1)
        scores_NBHE = self.scale_NH[:, None, :, None] * z_NBHE + self.shift_NH[:, None, :, None]
        logits_LBE = self._router_logits(batch).cpu().numpy()
        sources = zip(self.sources, self.targets, scores_NBHE, strict=True)
        for (signal, layer), targets, scores_BHE in sources:
            by_target = {
                target: scores_BHE[:, h].sigmoid().cpu().numpy() for h, target in enumerate(targets)
            }
            yield ReferenceScores(KIND, signal, layer, by_target, logits_LBE[layer])

    def _graph(self, number: int, token: Mapping[str, Tensor]) -> bytes:
        """One source's graph: normalisation folded in, unused targets cut off.

        `token`: what makes the token's numbers of the first layer's input, `token [D, Q]` and
        `token_bias`.
        """
        source = self.sources[number]
        num_targets = len(self.targets[number])
        outputs = num_targets * self.spec.num_experts
        inverse_D1 = self.deviation_ND[number].double().reciprocal()[:, None]
        mean_D = self.mean_ND[number].double()
        share_G11 = 1 - torch.tensor(DECAYS, dtype=torch.double)[:, None, None]
        state_GDR = inverse_D1 * self.to_state_NGDR[number].double() * share_G11
        state_DR = state_GDR.transpose(0, 1).flatten(1)
        in_DF = inverse_D1 * self.weight_in_NDF[number].double()
        in_bias_F = self.bias_in_NF[number].double() - mean_D @ in_DF
        token_QF = self.weight_token_NQF[number].double()
        low_DS = inverse_D1 * self.low_NDS[number].double()
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
            "low": low_DS,
            "low_bias": -mean_D @ low_DS,
            "by_expert": self.by_expert_NESO[number, ..., :outputs],
        }
        if source == FIRST_SOURCE:
            # The token is its own hidden state: what is made of it is part of the first product.
            weights["in"] = in_DF + token["token"] @ token_QF
            weights["in_bias"] = in_bias_F + token["token_bias"] @ token_QF
            weights |= {"memory": self.weight_past_NRF[number], **token}
        arrays = {key: value.float().cpu().numpy() for key, value in weights.items()}
        name = f"{KIND}_{source.signal}_{source.layer}"
        normaliser = (self.mean_ND[number].cpu().numpy(), self.deviation_ND[number].cpu().numpy())
        return residual_graph(arrays, num_targets=num_targets, name=name, normaliser=normaliser)

    @torch.no_grad()
    def export(self, spec: ModelSpec) -> Mapping[str, Predictor]:
        out_DQ = (self.token_DQ / self.token_deviation_D[:, None]).double()
        token = {"token": out_DQ, "token_bias": -self.token_mean_D.double() @ out_DQ}
        graphs = {source: self._graph(n, token) for n, source in enumerate(self.sources)}
        return {KIND: ResidualPredictor(spec, graphs, horizons=self.horizons, decays=DECAYS)}


def group(source: ForecastSource, place: int) -> str:
    """Returns the group in which the source's target number `place` is averaged.

    It is the horizon, or `entry` for forecasts from the first layer's input.
    """
    return f"horizon_{place + 1}" if source.signal is Signal.GATE_INPUT else "entry"


# Calibration: logits to the probability that an expert is chosen, by a scale and a shift.

ITERATIONS = 40
DAMPING = 1e-6
HALVINGS = 12
"""Newton's method on two numbers and a convex loss. A step that would raise the loss is halved:
undamped, Newton runs away from a forecast that is nearly always right."""
CLOSE_ENOUGH = 1e-6
"""Largest final step, in units of scale and shift: single precision."""
LEAST_SCALE = 1e-3
"""A scale of 0 or below would not keep the order."""


def platt(logits_BE: Tensor, chosen_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `(scale, shift)` of one forecast, fitted by Platt scaling.

    They minimise the cross-entropy of `sigmoid(scale z + shift)` against the chosen experts, with
    z the log-softmax over the experts; the scale is the softmax's temperature. The order of a
    token's experts stays.
    """
    z_M = logits_BE.double().log_softmax(-1).flatten()
    # The id E is no choice.
    wanted_BE = torch.zeros_like(logits_BE, dtype=torch.double)
    wanted_M = pad(wanted_BE, (0, 1)).scatter(-1, chosen_BK, 1.0)[:, :-1].flatten()
    # About the middle the two numbers hardly depend on each other, and the steps are straight.
    middle = z_M.mean()
    z_M = z_M - middle
    # From saying the same of every expert, the first steps go up a slope that bends little.
    share = wanted_M.mean().clamp(1e-6, 1 - 1e-6)
    found_2 = torch.stack([torch.full_like(share, LEAST_SCALE), share.logit()])
    loss = cross_entropy(found_2, z_M, wanted_M)
    for _ in range(ITERATIONS):
        step_2 = newton_step(found_2, z_M, wanted_M)
        if step_2.abs().max() < CLOSE_ENOUGH:
            break
        for _ in range(HALVINGS):
            tried_2 = found_2 - step_2
            tried = cross_entropy(tried_2, z_M, wanted_M)
            if tried <= loss and tried_2[0] >= LEAST_SCALE:
                found_2, loss = tried_2, tried
                break
            step_2 = step_2 / 2
    scale, shift = found_2
    return scale.float(), (shift - scale * middle).float()


def cross_entropy(found_2: Tensor, z_M: Tensor, wanted_M: Tensor) -> Tensor:
    """Mean over all pairs."""
    said_M = found_2[0] * z_M + found_2[1]
    return (softplus(said_M) - wanted_M * said_M).mean()


def newton_step(found_2: Tensor, z_M: Tensor, wanted_M: Tensor) -> Tensor:
    """`[2]`, to be subtracted."""
    chance_M = (found_2[0] * z_M + found_2[1]).sigmoid()
    error_M, curve_M = chance_M - wanted_M, chance_M * (1 - chance_M)
    gradient_2 = torch.stack([(error_M * z_M).mean(), error_M.mean()])
    a, b, d = ((curve_M * z_M**power).mean() for power in (2, 1, 0))
    hessian_22 = torch.stack([a, b, b, d]).view(2, 2)
    eye_22 = DAMPING * torch.eye(2, dtype=torch.double)
    damping_22 = hessian_22.diagonal().mean().clamp(min=1e-12) * eye_22
    return torch.linalg.solve(hessian_22 + damping_22, gradient_2)
