import pytest
from plan_checker import Planner


@pytest.fixture(scope="session")
def planner(tmp_path_factory):
    return Planner(tmp_path_factory.mktemp("plan"))
