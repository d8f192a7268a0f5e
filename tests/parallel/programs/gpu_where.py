"""Which GPU each rank has."""

from launching import record

import mpdp

world = mpdp.init(device="cuda", timeout=60)
record(
    {
        "ordinal": world.device.ordinal,
        "local_rank": world.local_rank,
        "gpus": len(mpdp.devices()),
        "current": world.device.xp.cuda.runtime.getDevice(),
    }
)
