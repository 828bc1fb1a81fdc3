"""Writes the table of model families from the one that the tests run."""

from tests.builders.families.table import FAMILIES


def render_families() -> str:
    """Returns the number of families that are served, and their names by how they are reached."""
    served = [family for family in FAMILIES.values() if not family.refused]
    lines = [
        f"{len(served)} of {len(FAMILIES)} families, each bitwise equal to plain Transformers:",
        "",
        "| experts reached by | checkpoint | families |",
        "|---|---|---|",
    ]
    for way, layout in sorted({(family.served, family.layout) for family in served}):
        names = [f.name for f in served if (f.served, f.layout) == (way, layout)]
        lines.append(f"| {way} | {layout} | {', '.join(names)} |")
    lines.append("")
    for family in FAMILIES.values():
        if family.refused:
            lines.append(f"* {family.name} is not served: {family.refused}.")
        elif not family.generates:
            lines.append(f"* {family.name}: logits only, it generates nothing.")
        elif family.always_same:
            lines.append(f"* {family.name}: {family.always_same}.")
    return "\n".join(lines) + "\n"
