"""Norms and rotations of single tokens have the model's own bits, or are left to the model."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from runtime.hf import small_steps
from runtime.hf.linear import SINGLE_ROWS
from runtime.hf.small_steps import OwnNorm, convert_norm, convert_small_steps, own_rotation

pytestmark = pytest.mark.skipif(small_steps.normalise is None, reason="no compiled code")
DTYPES = pytest.mark.parametrize("dtype", SINGLE_ROWS)
NORMS = (qwen3.Qwen3MoeRMSNorm, gpt_oss.GptOssRMSNorm, qwen3_next.Qwen3NextRMSNorm)
WIDTHS = (8, 24, 104, 128, 256, 1056, 2048, 2880, 5120)
"""With and without whole turns of the kernel's sums, of one and of several levels."""


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        torch.manual_seed(0)
        yield


def bits(tensor):
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32).tolist()


def make_norm(cls, width, dtype):
    norm = cls(width).to(dtype)
    norm.weight.normal_()
    return norm, deepcopy(norm)


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cls", NORMS)
def test_norm__has_the_models_bits(cls, width, dtype):
    norm, original = make_norm(cls, width, dtype)
    convert_norm(norm, {})
    assert isinstance(norm, OwnNorm) == torch.cpu._is_avx2_supported()
    for rows in (1, 3):
        for scale in (1e-3, 1, 300):
            x = (torch.randn(1, rows, width) * scale).to(dtype)
            assert bits(norm(x)) == bits(original(x))


def make_cases():
    x = torch.randn(1, 4, 64)
    return {
        "another dtype": x.double(),
        "several threads": torch.randn(1, 1024, 64),
        "not contiguous": torch.randn(1, 64, 4).transpose(1, 2),
        "no numbers": x.masked_fill(x > 1, torch.nan),
        "infinite": x.masked_fill(x > 2, torch.inf),
    }


@pytest.mark.parametrize("case", make_cases())
def test_norm__leaves_other_rows_to_the_model(case):
    norm, original = make_norm(qwen3.Qwen3MoeRMSNorm, 64, torch.float32)
    convert_norm(norm, {})
    x = make_cases()[case]
    assert norm.normalise(x, norm.weight) is None
    assert torch.equal(norm(x), original(x)) or case in ("no numbers", "infinite")
    assert norm(x).isnan().tolist() == original(x).isnan().tolist()


def test_norm__in_another_dtype_than_it_was_tried_in_is_the_models():
    norm, original = make_norm(gpt_oss.GptOssRMSNorm, 64, torch.float32)
    convert_norm(norm, {})
    x = torch.randn(1, 1, 64).bfloat16()
    assert torch.equal(norm.bfloat16()(hidden_states=x), original.bfloat16()(x))
    assert norm.normalise(x, norm.weight) is None


def test_norm__has_gradients():
    norm, _ = make_norm(qwen3.Qwen3MoeRMSNorm, 64, torch.float32)
    convert_norm(norm, {})
    with torch.enable_grad():
        norm(torch.randn(1, 1, 64)).sum().backward()
    assert norm.weight.grad is not None


class ShiftedNorm(qwen3.Qwen3MoeRMSNorm):
    def forward(self, x):
        return super().forward(x) + 1e-3


class GatedRMSNorm(qwen3.Qwen3MoeRMSNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


def backwards(x, *args):
    """Sums in another order."""
    return x.flip(-1).pow(2).mean(-1, keepdim=True)


class BackwardsNorm(qwen3.Qwen3MoeRMSNorm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(backwards(x) + self.variance_epsilon))


class FlatNorm(qwen3.Qwen3MoeRMSNorm):
    def forward(self, x):
        rows, columns = x.shape
        return super().forward(x.view(rows, columns))


@pytest.mark.parametrize("cls", [ShiftedNorm, GatedRMSNorm, BackwardsNorm, FlatNorm, nn.RMSNorm])
def test_convert_norm__leaves_another_norm_as_it_is(cls):
    norm, _ = make_norm(cls, 2056, torch.float32)
    convert_norm(norm, {})
    assert type(norm) is cls


def draw_rotation(dtype, rotated=32):
    shapes = (1, 6, 1, 32), (1, 2, 1, 32), (1, 1, rotated), (1, 1, rotated)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@DTYPES
@pytest.mark.parametrize(
    ("module", "rotated", "is_own"),
    [(qwen3, 32, True), (qwen3_next, 16, True), (deepseek, 32, True), (ernie, 32, False)],
    ids=["whole", "in part", "deepseek", "interleaved"],
)
def test_rotation__has_the_models_bits(module, rotated, is_own, dtype, monkeypatch):
    original, calls = module.apply_rotary_pos_emb, []
    original = getattr(original, "__wrapped__", original)

    def watched(*args):
        calls.append(args)
        return original(*args)

    rotate, inputs = own_rotation(watched), draw_rotation(dtype, rotated)
    rotate(*inputs)
    calls.clear()
    found, expected = rotate(*inputs), original(*inputs)
    is_own &= torch.cpu._is_avx2_supported()
    assert len(calls) == (not is_own)
    assert list(map(bits, found)) == list(map(bits, expected))


def test_rotation__of_several_tokens_or_what_is_no_number_is_the_models():
    several = [torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32), *torch.randn(2, 1, 5, 32)]
    no_number = draw_rotation(torch.float32)
    no_number[0][0, 0, 0, 0] = torch.nan
    for inputs in (several, no_number):
        found = own_rotation(qwen3.apply_rotary_pos_emb)(*inputs)
        expected = qwen3.apply_rotary_pos_emb(*inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_convert_norm__tries_norms_with_other_settings_apart():
    ways = {}
    for epsilon in (1e-6, 1e-6, 1e-3):
        norm = qwen3.Qwen3MoeRMSNorm(64, eps=epsilon)
        convert_norm(norm, ways)
        assert norm.moecast_way.epsilon == epsilon
    assert len(ways) == 2


def test_convert_small_steps__converts_a_model_once(monkeypatch):
    monkeypatch.setattr(qwen3, "apply_rotary_pos_emb", qwen3.apply_rotary_pos_emb)
    attention = nn.Module()
    attention.__class__ = type("Attention", (nn.Module,), {"__module__": qwen3.__name__})
    model = nn.ModuleList([attention, qwen3.Qwen3MoeRMSNorm(64)])
    convert_small_steps(model)
    rotation, kind = qwen3.apply_rotary_pos_emb, type(model[1])
    convert_small_steps(model)
    assert (qwen3.apply_rotary_pos_emb, type(model[1])) == (rotation, kind)
    assert hasattr(rotation, "moecast_rotates")
    assert issubclass(kind, qwen3.Qwen3MoeRMSNorm)
    assert kind.__name__ == "Qwen3MoeRMSNorm"


def test_rotation__with_other_arguments_is_the_models():
    def turn_one(x, cos, sin, unsqueeze_dim):
        return x * cos + sin + unsqueeze_dim

    found = own_rotation(turn_one)(torch.ones(2), torch.ones(2), torch.ones(2), 2)
    assert found.tolist() == [4, 4]
    assert own_rotation(turn_one)(1, cos=2, sin=3, unsqueeze_dim=4) == 9
