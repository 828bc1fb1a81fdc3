"""Writes the table of model families from the one that the tests run."""

from tests.builders.families.table import FAMILIES, Family


def render_families() -> str:
    """Returns the number of families that are served, and a row for each family."""
    served = sum(not family.refused for family in FAMILIES.values())
    head = (
        f"{served} of {len(FAMILIES)} families, each bitwise equal to plain Transformers:\n\n"
        "| family | experts reached by | checkpoint | equal to eager, bit for bit |\n"
        "|---|---|---|---|\n"
    )
    return head + "".join(f"{write_row(family)}\n" for family in FAMILIES.values())


def write_row(family: Family) -> str:
    if family.refused:
        return f"| {family.name} | - | - | not served: {family.refused} |"
    checked = "logits, tokens" if family.generates else "logits; it generates nothing"
    if family.always_same:
        checked += f" ({family.always_same})"
    return f"| {family.name} | {family.served} | {family.layout} | {checked} |"
