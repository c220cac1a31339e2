# %% [markdown]
# # A table, from its backlog to a clean state
#
# Each cell runs as it is: in Jupyter (`jupytext --to ipynb docs/notebook.py`), in an editor that knows `# %%`, or
# all at once with `python docs/notebook.py`. It uses nothing but what [api.md](api.md) promises, and a table that
# `memwal-ops demo` makes with pylance's own writer.

# %%
import subprocess
import tempfile
from pathlib import Path

import memwal_ops

# %% [markdown]
# ## A table with something waiting
#
# The demo writes orders through MemWAL into three regions, updates some, deletes some, and flushes. Nothing is merged.

# %%
folder = Path(tempfile.mkdtemp(prefix="memwal-ops-notebook-"))
subprocess.run(["memwal-ops", "demo", "--no-merge", "--dir", folder], check=True, stdout=subprocess.DEVNULL)
uri = str(folder / "orders.lance")

table = memwal_ops.open_table(uri)
summary = table.summary()
print(f"revision {table.revision}, {summary.parts} regions, {summary.backlog['generations']:.0f} unmerged generations")
print("jobs:", ", ".join(sorted(table.jobs)))

# %% [markdown]
# ## Merge
#
# First a plan, which changes nothing; then the run. One new version carries rows, deletions and progress together, so
# a reader sees all of it or nothing. The report is what the command prints, and as a document what `--json` prints.

# %%
plan = memwal_ops.run_job(uri, "merge", apply=False)
print(plan.decision, "- still at revision", memwal_ops.open_table(uri).revision)

report: memwal_ops.Report = memwal_ops.run_job(uri, "merge", max_bytes="256MiB")
print(report.describe())
print("exit code", report.exit_code, "- keys:", ", ".join(report.to_json()))

# %% [markdown]
# A table is one revision: `table` shows what it showed, and `newest()` reads everything again.

# %%
print("before:", table.revision, "now:", table.newest().revision)
print("waiting:", table.newest().summary().backlog["generations"])
print("a second merge:", memwal_ops.run_job(uri, "merge").decision)

# %% [markdown]
# ## Indexes and readers
#
# `catchup` lets the base indexes cover what was merged, and `snapshot` stores the state of all regions, so that a
# reader lists nothing.

# %%
for job in ("catchup", "snapshot"):
    print(job, "->", memwal_ops.run_job(uri, job).decision)

# %% [markdown]
# ## What is deletable
#
# `gc` deletes only with `apply=True`, and only what nothing needs any more. The base version from before the merge
# still reads from the generations, so nothing is deletable today; the plan names what keeps it.

# %%
print(memwal_ops.run_job(uri, "gc").describe())

# %% [markdown]
# ## When it is refused
#
# Every refusal is a `MemwalOpsError`: a word for programs, a code for scripts, a sentence, and what to do.

# %%
for wrong in (lambda: memwal_ops.run_job(uri, "merge", max_bytes="much"), lambda: memwal_ops.open_table(folder / "no")):
    try:
        wrong()
    except memwal_ops.MemwalOpsError as error:
        print(f"{error.reason} ({error.exit_code}): {error}\n  what to do: {error.remedy}")

# %% [markdown]
# The rest of the table's life is one call on a timer: `memwal_ops.run_job(uri, "maintain", apply=True)`.

# %%
print(memwal_ops.run_job(uri, "maintain", apply=True).decision)
