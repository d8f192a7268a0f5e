"""Regions: where arrays lie, and that they are forgotten with their last view."""

import gc

import numpy as np

from mpdp.comm.regions import Regions


def memory(nbytes):
    return np.frombuffer(bytearray(nbytes), dtype=np.uint8)


def test_arrays_are_found_by_their_address_on_every_rank():
    regions = Regions(1)
    parts = [memory(4096) for _ in range(3)]
    own = parts[1]
    regions.add(5, parts)
    array = own[64:128].view(np.float32)
    here, there = regions.locate(array), regions.locate(own[16:80].view(np.float32))
    assert here and there and here != there
    assert regions.locate(own) == 5 << 44
    found = regions.parts(array, here, [there, here, here])
    assert found[1] is array
    parts[0][16:20].view(np.float32)[0] = 7
    parts[2][64:68].view(np.float32)[0] = 9
    assert [float(part[0]) for part in found] == [7, 0, 9]
    assert [part.size for part in found] == [16] * 3
    assert regions.parts(array, here, [there, here, here])[0] is found[0]


def test_what_is_not_in_one_region_on_all_ranks_has_no_parts():
    regions = Regions(0)
    parts = [memory(4096), memory(4096)]
    regions.add(1, parts)
    here = regions.locate(parts[0])
    assert regions.locate(memory(10)) == 0
    assert regions.locate(np.frombuffer(parts[0].data, np.uint8)[4000:]) != 0
    assert regions.parts(parts[0], here, [here, 0]) is None
    assert regions.parts(parts[0], 0, [0, here]) is None
    assert regions.parts(parts[0], here, [here, 2 << 44]) is None


def test_a_region_goes_with_the_last_view_of_this_ranks_part():
    regions = Regions(0)
    parts = [memory(4096), memory(4096)]
    regions.add(regions.next_number(), parts)
    view = parts[0][8:16].view(np.int64)
    regions.parts(view, regions.locate(view), [regions.locate(view)] * 2)
    del parts
    assert len(regions) == 1
    del view
    assert len(regions) == 0
    assert regions.next_number() == 2


def test_memory_that_is_collected_while_a_place_is_looked_up():
    """The collector may run at any allocation, and then takes regions out: here at each one of a call in turn."""
    regions = Regions(0)
    own = np.frombuffer(bytearray(64), np.uint8)
    regions.add(1, [own])
    before = gc.get_threshold()
    try:
        for allocations in range(12):
            gc.collect()
            gc.disable()
            for number in range(2, 12):
                cycle = [np.frombuffer(bytearray(64), np.uint8)]
                regions.add(number, cycle[:1])
                cycle.append(cycle)
            del cycle
            gc.set_threshold(gc.get_count()[0] + allocations, *before[1:])
            gc.enable()
            assert regions.locate(own) == 1 << 44
    finally:
        gc.set_threshold(*before)
        gc.enable()
