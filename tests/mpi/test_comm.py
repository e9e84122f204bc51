"""MPI below the contract: real ranks, real signals."""

from __future__ import annotations

import pytest

from tests.comm_contract import CHECKS
from tests.mpi.harness import REPO, mpirun, needs_mpi

pytestmark = [needs_mpi, pytest.mark.mpi, pytest.mark.timeout(180)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_contract(n: int) -> None:
    result = mpirun(n, REPO / "tests" / "comm_contract.py", timeout_s=150).check()
    assert result.stdout.count(" ok on ") == n * len(CHECKS)


def test_contract_under_ulfm() -> None:
    result = mpirun(3, REPO / "tests" / "comm_contract.py", ulfm=True, timeout_s=150).check()
    assert result.stdout.count(" ok on ") == 3 * len(CHECKS)
