"""What launchers make, what a second worker is worth, what a kill costs."""

from benchmarks.tables.markdown import figure, result, size, table

PARTS = ("core", "engines", "second_worker", "killed", "train")


def launchers() -> list[str]:
    """A row for each launcher, and what the core pays for them."""
    found = result("launchers")
    if found is None or not set(PARTS) <= set(found):
        return []
    whole = found["engines"]["this process"]["digest"]
    rows = [
        [
            name,
            "the same" if one["digest"] == whole else "ANOTHER",
            figure(one["start_seconds"], 1, " s"),
            figure(one["seconds"], 1, " s"),
            f"{one['parts']}",
            f"{one['retried']}",
        ]
        for name, one in {
            **{name: one for name, one in found["engines"].items() if "parts" in one},
            f"local, 2 workers, {found['killed']['replaced']} of them killed (one every "
            f"{found['killed']['every_seconds']:.0f} s)": found["killed"],
        }.items()
    ]
    train = found["train"]
    same = len({one["weights_digest"] for one in train.values()}) == 1
    added = found["core"]["extra_bytes"]
    imported = ", ".join(found["core"]["imports"]) or "neither Ray nor submitit"
    return [
        f"`launcher=` recording {found['prompts']} prompts with the reference model (routing only, "
        f"one thread in each worker, {found['machine']['cores']} cores): digest beside that of one "
        "process without workers, time until the first worker has its model, time from the first "
        "part handed out to the last one done, parts, parts done again:",
        "",
        *table(["launcher", "digest", "start", "recording", "parts", "again"], rows),
        "",
        f"Two workers record {found['second_worker']['speedup']:.2f} times as fast as one (medians "
        f"of {found['repetitions']}). Weights trained by groups of layers on two workers are "
        f"{'bitwise those' if same else 'NOT those'} of one process ("
        + "; ".join(f"{name}: {one['seconds']:.0f} s" for name, one in train.items())
        + f"). The core imports {imported}; `collect --help` takes "
        f"{found['core']['help_seconds']:.2f} s; the extras ray and slurm install "
        f"{size(sum(added.values()))} that the core does without.",
        "",
    ]
