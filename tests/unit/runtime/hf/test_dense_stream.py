"""Dense weights read layer by layer: bitwise the same outputs, through few buffers."""

from functools import partial

import pytest
import torch

from runtime.config import StoreConfig
from runtime.errors import TransferError
from runtime.generation.batch.dense_placement import stream_dense_weights
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf.dense_stream import count_buffer_bytes, count_dense_bytes, find_dense_layers
from runtime.store.spill import SpillFile
from tests.builders import lockstep
from tests.builders.families.build import save_family
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.served import serving

NUM_LAYERS = 5
stream = partial(stream_dense_weights, config=StoreConfig(), with_gates=True)
TOKENS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen2_moe(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS, num_experts=6)


def test_stream__computes_bitwise_the_same_and_gives_the_weights_back(folder):
    expected = plain_eager(folder)(TOKENS).logits
    with serving(folder, budget="50%") as model, torch.no_grad():
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        layers = find_dense_layers(model, model.moecast.layers)
        size, buffers = count_dense_bytes(layers), count_buffer_bytes(layers)
        assert buffers < size / 2
        streamed = stream(model)
        in_memory = sum(weight.nbytes for weight in model.parameters())
        assert in_memory <= sum(weight.nbytes for weight in before.values()) - 0.9 * size
        for _ in range(2):
            assert torch.equal(model(TOKENS).logits, expected)
        # A layer and its router are read once in each pass.
        assert streamed.num_read == 2 * 2 * NUM_LAYERS
        streamed.close()
        assert torch.equal(model(TOKENS).logits, expected)
        assert all(torch.equal(before[name], one) for name, one in model.named_parameters())


@pytest.mark.parametrize("with_gates", [True, False])
def test_stream__a_group_reads_each_layer_once_a_step_and_the_next_one_ahead(folder, with_gates):
    ahead = []
    with serving(folder, budget="50%") as model:

        def run():
            return model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)

        expected, streamed = run(), stream(model, with_gates=with_gates)
        start = streamed._start_read

        def start_read(part, *, must):
            ahead.append((part.buffer is None, must))
            start(part, must=must)

        streamed._start_read = start_read
        with LockstepGroup(model) as group:
            running = [group.start(run) for _ in range(4)]
            steps = lockstep.run(group)
        lockstep.assert_equal(lockstep.results_of(running), [expected] * 4)
    # Also the first layer of a step that never came.
    assert streamed.num_read == steps * (2 * NUM_LAYERS if with_gates else NUM_LAYERS) + 1
    # Only the very first layer is not read ahead.
    assert sum(missing and must for missing, must in ahead) == 1


def test_stream__that_cannot_be_written_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    """Weights that were renamed or cast go to a file; the second time there is room for it."""
    folder = save_family(tmp_path / "model", "mixtral", dtype=torch.bfloat16)
    with serving(folder, budget="50%", dtype="float32") as model, torch.no_grad():
        expected, stores = model(TOKENS).logits, []
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        write, room = SpillFile.write, iter(range(3))

        def fill_up(file, *args, **options):
            stores.append(file)
            if next(room, None) is None:
                raise TransferError("the disk is full")
            write(file, *args, **options)

        with monkeypatch.context() as broken:
            broken.setattr(SpillFile, "write", fill_up)
            with pytest.raises(TransferError, match="the disk is full"):
                stream(model)
        assert len(stores) == 4
        assert stores[0]._file.closed
        assert all(torch.equal(before[name], one) for name, one in model.named_parameters())
        assert torch.equal(model(TOKENS).logits, expected)
        streamed = stream(model)
        assert streamed._store.spilled_bytes > 0
        assert torch.equal(model(TOKENS).logits, expected)
        assert streamed.num_read > 0


def test_stream__a_failed_read_is_an_error_and_the_next_pass_is_right(folder, monkeypatch):
    with serving(folder, budget="50%") as model, torch.no_grad():
        expected, streamed = model(TOKENS).logits, stream(model)
        read, failures = streamed._read, iter([True])

        def fail_once(part, buffer):
            if part.module is model.moecast.layers[3].block and next(failures, False):
                raise TransferError("the disk is gone")
            read(part, buffer)

        monkeypatch.setattr(streamed, "_read", fail_once)
        with pytest.raises(TransferError, match="the disk is gone"):
            model(TOKENS)
        assert torch.equal(model(TOKENS).logits, expected)
