from lockstep.hooks.ordered import OrderedLaunches


def test_launches_follow_the_tickets_whoever_is_ready_first() -> None:
    launches, seen = OrderedLaunches(), []
    tickets = [launches.ticket() for _ in range(4)]
    for ticket in (2, 1, 3):
        launches.ready(tickets[ticket], lambda ticket=ticket: seen.append(ticket))
        assert seen == []
    launches.ready(tickets[0], lambda: seen.append(0))
    assert seen == [0, 1, 2, 3]
