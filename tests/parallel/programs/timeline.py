"""Take a timeline of a workload: ``timeline.py TRANSPORT WORKLOAD PATH``; see test_timeline.py for what is expected."""

import sys

import numpy as np
from launching import record

import mpdp
from mpdp.bench.workloads import build
from mpdp.comm.choose import over_mpi
from mpdp.comm.mpi import MpiCommunicator
from mpdp.comm.spans import Spans
from mpdp.report.timeline import Timeline

TRANSPORT, WORKLOAD, PATH = sys.argv[1:]

world = mpdp.init(transport=TRANSPORT)
if WORKLOAD == "thread":
    base = over_mpi(world.comm)
    comm = MpiCommunicator(base._lanes["urgent"], progress="thread")
    arrays = [np.ones(1 << 16, np.float32) for _ in range(3)]
    spans = Spans(1)
    spans.begin_step()
    comm.note(spans)
    spans.labels = {id(array): f"chunk {i}" for i, array in enumerate(arrays)}
    for request in [comm.start_all_reduce(array) for array in arrays]:
        request.wait()
    record([(span.row, span.name, span.nbytes, span.waited) for span in spans.finished()[0]])
    comm.close()
else:
    workload = build(WORKLOAD, world.rank, 1)
    trainer = mpdp.Trainer(workload.model, workload.loss, workload.optimizer, world=world)
    with Timeline(trainer.parallel, steps=2) as timeline:
        for _ in range(3):
            trainer.step(workload.batch)
    timeline.write(PATH)
    record([timeline.figures(), [view.nbytes for view in trainer.parallel.reducer.views]])
