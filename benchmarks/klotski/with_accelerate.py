"""Accelerate's disk offload of the same model, all prompts as one padded batch.

Runs in the peers' `accelerate` environment, beside `benchmarks/peers/workers`, and knows nothing of
moecast.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers" / "workers"))

import torch
from measured import Request, peak_resident_bytes, read_bytes
from with_accelerate import offloaded


def main(request_path: str, report_path: str) -> None:
    request = Request(**json.loads(Path(request_path).read_text()))
    model = offloaded(request)
    inputs = torch.tensor(request.prompts)  # of one length
    before, start = read_bytes(), time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=request.new_tokens,
            min_new_tokens=request.new_tokens,
            do_sample=False,
        )
    seconds = time.perf_counter() - start
    report = {
        "versions": {name: version(name) for name in ("accelerate", "torch", "transformers")},
        "seconds": seconds,
        "tokens_per_second": len(inputs) * request.new_tokens / seconds,
        "read_bytes": read_bytes() - before,
        "peak_resident_bytes": peak_resident_bytes(),
        "answers": output[:, inputs.shape[1] :].tolist(),
    }
    Path(report_path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
