"""One module per expert in a container (switch_transformers, nllb_moe).

The container's own loop and each member's own forward run as they are; a member's parameters are
the arena's while it runs, and placeholders otherwise.
"""

import functools
import re
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.hf.adapters.base import (
    ExpertsAdapter,
    LayerExperts,
    MissingParameter,
    RouterOutput,
    find_tensors,
    has_class_suffix,
    take_parameter,
)
from runtime.store.weight_plan import FusedParameter

NUMBERED = re.compile(r"\d+$")
"""A container may hold parts that are no experts (nllb_moe: a dropout)."""


def _members(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if NUMBERED.search(name)}


def _placeholders(member: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Dotted name of each placeholder in a member -> what has it, under which name."""
    return {
        f"{path}.{name}".lstrip("."): (owner, name)
        for path, owner in member.named_modules()
        for name, value in vars(owner).items()
        if isinstance(value, MissingParameter)
    }


def run_member(
    member: nn.Module,
    places: dict[str, tuple[nn.Module, str]],
    served: LayerExperts,
    expert: int,
    *inputs: Tensor,
) -> Tensor:
    """The member's own forward, with the expert's parameters in their places meanwhile."""
    absent: dict[str, Any] = {}
    try:
        for target, tensor in served.pin(expert).items():
            owner, name = places[target]
            absent[target] = vars(owner)[name]
            vars(owner)[name] = tensor
        return type(member).forward(member, *inputs)
    finally:
        for target, placeholder in absent.items():
            owner, name = places[target]
            vars(owner)[name] = placeholder


class MembersAdapter(ExpertsAdapter):
    """Adapts containers named `...Experts` of numbered modules of one class."""

    name = "members"

    def matches(self, module: nn.Module) -> bool:
        return (
            isinstance(module, nn.ModuleDict | nn.ModuleList)
            and has_class_suffix(module, "Experts")
            and len({type(member) for member in _members(module).values()}) == 1
        )

    def num_experts(self, module: nn.Module) -> int:
        return len(_members(module))

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        members = _members(module)
        shapes = [
            {name: (tuple(p.shape), p.dtype) for name, p in member.named_parameters()}
            for member in members.values()
        ]
        if any(shape != shapes[0] for shape in shapes):
            raise CheckpointError(
                f"{bank}: its experts differ in shape; moecast needs equal shapes"
            )
        taken = []
        for name, (shape, dtype) in shapes[0].items():
            targets = tuple(f"{bank}.{member}.{name}" for member in members)
            taken.append(FusedParameter(bank, name, (len(members), *shape), dtype, members=targets))
            path, _, attribute = name.rpartition(".")
            for member_name, member in members.items():
                owner = member.get_submodule(path)
                take_parameter(owner, attribute, f"{bank}.{member_name}", name=name)
        return taken

    def attach(self, module: nn.Module, served: LayerExperts) -> None:
        for expert, member in enumerate(_members(module).values()):
            member.forward = functools.partial(
                run_member, member, _placeholders(member), served, expert
            )

    def top_k(self, router: nn.Module) -> int:
        return 2 if hasattr(router, "second_expert_policy") else 1

    def routing(self, output: object, router: nn.Module, _parent: nn.Module, /) -> RouterOutput:
        """Reads `(choice, weights, logits_TE)` of routers with a capacity, as the experts read it.

        A choice `(batch, sequence, E)` is a mask, 1 at the chosen expert and all 0 for a token
        beyond the capacity. A choice `(T, columns)` holds expert ids, which the experts one-hot
        themselves; the weights have its shape. (NLLB-MoE hands a mask over this way in Transformers
        5.23, so that every token goes to the experts 0 and 1; what is computed is reported.)
        """
        choice, weights, logits = find_tensors(output)
        num_experts = logits.shape[-1]
        if choice.ndim == 3:
            chosen, indices = choice.max(dim=-1, keepdim=True)
            return RouterOutput(indices.masked_fill(chosen == 0, num_experts), logits, weights)
        used_TE = F.one_hot(choice, num_classes=num_experts)
        weights_TE = (used_TE * weights.unsqueeze(-1)).sum(dim=1)
        found_TK, indices_TK = used_TE.any(dim=1).long().topk(self.top_k(router), dim=-1)
        weights_TK = weights_TE.gather(-1, indices_TK)
        return RouterOutput(indices_TK.masked_fill(found_TK == 0, num_experts), logits, weights_TK)
