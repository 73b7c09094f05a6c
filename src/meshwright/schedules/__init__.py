"""Pipeline schedules. In: a name or lists of tasks, and costs. Out: who runs what when.

`types` holds the data: `Schedule`, `Task`, `Costs`. `named` and `auto` build schedules, `files`
reads and writes them. `validation` proves that one runs, `timeline` simulates it, and `text_plot`,
`svg_plot` and `trace` draw the result; `compare` puts all of them side by side.

Pure: no device is touched and JAX is not imported.
"""

from meshwright.schedules.auto import Auto as Auto
from meshwright.schedules.compare import compare_schedules as compare_schedules
from meshwright.schedules.files import read_schedule as read_schedule
from meshwright.schedules.files import write_schedule as write_schedule
from meshwright.schedules.named import schedule as schedule
from meshwright.schedules.timeline import Timeline as Timeline
from meshwright.schedules.timeline import simulate as simulate
from meshwright.schedules.types import Costs as Costs
from meshwright.schedules.types import Schedule as Schedule
from meshwright.schedules.types import Task as Task
from meshwright.schedules.validation import Proof as Proof
from meshwright.schedules.validation import check as check
