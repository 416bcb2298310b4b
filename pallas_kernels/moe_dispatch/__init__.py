"""Token rows to send rows, grouped by destination, also quantised on the way: moves rows on one device only.

The slots come from the caller, by a sort of the T*K expert numbers, for which there is no kernel here. Compiled for
an H200, XLA's layout (argsort, its inverse, counts and offsets per expert) goes over the T*K entries 8 times: a
radix sort's histogram and 4 passes over pairs, then 3 of its 6 other kernels. A kernel would go over them twice
(count, place). At T 4096, K 6 that is about 1.5 MB against 0.4 MB, where the rows are 411 MB at D 7168; at a few
tokens it is launches that count. Which is faster there is not measured, so XLA's stays.
"""

from pallas_kernels.moe_dispatch.api import dispatch_rows as dispatch_rows
from pallas_kernels.moe_dispatch.api import dispatch_rows_fp8 as dispatch_rows_fp8
from pallas_kernels.moe_dispatch.quantize import ScaleKind as ScaleKind
