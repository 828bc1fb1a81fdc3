"""A plan and a run as a person reads them."""

from rich.console import Console
from rich.table import Table

from runtime.generation.batch.planning import Planned

MIB = 2**20


def plan_table(planned: Planned) -> Table:
    """Both sides of each inequality, for the n that is taken."""
    plan = planned.plan
    table = Table(title=f"group of n={plan.n} batches (klotski 7, inequalities 4 to 7)")
    table.add_column("")
    table.add_column("what has to be there, and when")
    table.add_column("computing", justify="right")
    table.add_column("transfers", justify="right")
    table.add_column("hidden")
    for row in plan.inequalities:
        table.add_row(
            f"({row.number})",
            row.what,
            f"{1000 * row.computes:.2f} ms",
            f"{1000 * row.transfers:.2f} ms",
            "yes" if row.holds else "no",
        )
    return table


def show_plan(console: Console, planned: Planned) -> None:
    """The table, what was measured, memory, and what there is to say."""
    plan, costs = planned.plan, planned.measured.costs
    console.print(plan_table(planned))
    console.print(
        f"{'measured before' if planned.was_known else 'measured'}: attention "
        f"{1000 * costs.attention:.2f} ms, gate {1000 * costs.gate:.2f} ms a batch; an expert "
        f"{1000 * costs.expert_fixed:.2f} ms and {1e6 * costs.expert_per_token:.1f} us a token; "
        f"its transfer {1000 * costs.expert_io:.2f} ms",
        highlight=False,
    )
    offloaded = (
        f", {plan.offloaded_bytes / MIB:.1f} MiB of them outside" if plan.offloaded_bytes else ""
    )
    console.print(
        f"caches of {plan.n} batches: {plan.kv_bytes / MIB:.1f} MiB{offloaded}", highlight=False
    )
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
