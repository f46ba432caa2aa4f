"""What the soak run calls flat memory. Needs no GPU; the run itself is soak.py."""

import soak


def test_growth_beyond_the_slack_is_named():
    before = {"GPU tensors": 300, "GPU beside tensors": 900, "host": 2000}
    assert soak.growth(before, before) == []
    within = {kind: before[kind] + slack for kind, slack in soak.SLACK.items()}
    assert soak.growth(before, within) == []
    assert soak.growth(before, {**within, "GPU beside tensors": 1029}) == [
        "GPU beside tensors memory grew from 900 to 1029 MiB"
    ]


def test_the_age_of_a_process_counts_from_its_start():
    first = soak.process_age()
    assert 0 < first <= soak.process_age() < 24 * 3600
