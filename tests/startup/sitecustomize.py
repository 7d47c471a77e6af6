"""Read by every interpreter that a test launches: a process that mostly imports need not look for garbage meanwhile.

A third of the time that torch's modules take to load goes there.  Collections still happen, only not as often.
"""

import gc

gc.set_threshold(50_000, 20, 100)
