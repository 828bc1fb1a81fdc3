"""Write the table of docs/families.md from the table that the tests run.

python -m tests.families.table
"""

from pathlib import Path

from tests.builders.families.table import FAMILIES, Family

PAGE = Path(__file__).parents[2] / "docs/families.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"


def row(family: Family) -> str:
    if family.refused:
        return f"| {family.name} | - | - | not served: {family.refused} |"
    checked = "logits, tokens" if family.generates else "logits; it generates nothing"
    if family.always_same:
        checked += f" ({family.always_same})"
    return f"| {family.name} | {family.served} | {family.layout} | {checked} |"


def rendered() -> str:
    served = sum(not family.refused for family in FAMILIES.values())
    head = (
        f"{served} of {len(FAMILIES)} families, each bitwise equal to plain Transformers:\n\n"
        "| family | experts reached by | checkpoint | equal to eager, bit for bit |\n"
        "|---|---|---|---|\n"
    )
    return head + "".join(f"{row(family)}\n" for family in FAMILIES.values())


def written(text: str) -> str:
    """What stands between the marks."""
    return text.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    text = PAGE.read_text()
    assert BEGIN in text, f"{PAGE.name} has no {BEGIN.strip()}"
    PAGE.write_text(text.replace(BEGIN + written(text) + END, BEGIN + rendered() + END))


if __name__ == "__main__":
    main()
