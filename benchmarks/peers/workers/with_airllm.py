"""AirLLM: one layer after another, read from the shards that it writes on first use."""

import json
from pathlib import Path

import torch
from airllm import AutoModel
from greedy import greedy_answers
from peer_worker import AnswerFunction, PeerRequest, main


def link_checkpoint(folder: Path, scratch: Path) -> Path:
    """Links the checkpoint, with a tokenizer class that Transformers 4 has."""
    copy = scratch / "checkpoint"
    copy.mkdir(exist_ok=True)
    for path in folder.iterdir():
        link = copy / path.name
        if path.name == "tokenizer_config.json":
            settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
            # A list in Transformers 5, a dictionary in 4; prompts come as token ids.
            settings.pop("extra_special_tokens", None)
            link.write_text(json.dumps(settings))
        elif not link.exists():
            link.symlink_to(path)
    return copy


def load(request: PeerRequest) -> AnswerFunction:
    torch.set_num_threads(request.threads)
    scratch = Path(request.scratch)
    model = AutoModel.from_pretrained(
        str(link_checkpoint(Path(request.weights), scratch)),
        device="cpu",
        dtype=torch.float32,
        layer_shards_saving_path=str(scratch / "shards"),
    )
    return greedy_answers(model)


if __name__ == "__main__":
    main(load, ("airllm", "torch", "transformers"))
