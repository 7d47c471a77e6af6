from lockstep.hooks.wire import WireCount, all_gather_bytes, all_reduce_bytes, all_to_all_bytes


def test_a_world_of_one_sends_nothing() -> None:
    assert [f(1000, 1) for f in (all_reduce_bytes, all_gather_bytes, all_to_all_bytes)] == [0, 0, 0]


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for num_ranks in (2, 3, 4, 256):
        shard = 1024
        whole = shard * num_ranks
        by_halves = all_to_all_bytes(whole, num_ranks) + all_gather_bytes(shard, num_ranks)
        assert all_reduce_bytes(whole, num_ranks) == by_halves


def test_bytes_are_rounded_up_never_lost() -> None:
    assert all_reduce_bytes(10, 3) == 14  # 13.3
    assert all_to_all_bytes(10, 3) == 7  # 6.7


def test_ratio_of_what_travelled() -> None:
    count = WireCount()
    assert count.ratio == 1.0
    count.add(bytes_on_wire=25, bytes_uncompressed=100)
    assert count.ratio == 4.0
