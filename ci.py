"""The local CI stub: frozen job records with fixed delays, nothing random, nothing real.

    source = LocalCi()
    await source.jobs(415)

Pull request 415 fails in a job with a quick log, 418 in one whose log takes 8 s; 416 is green, 417 has no jobs.
"""

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO

from sources.jobs import Fault, Job, JobState, SourceError

LIST_DELAY_S = 0.05
FETCH_TIMEOUT_S = 3.0

_UNIT_TESTS = """\
2026-11-27T09:14:02.1184310Z ##[group]Run python -m pytest -q tests/unit
2026-11-27T09:14:02.1185520Z python -m pytest -q tests/unit
2026-11-27T09:14:02.1211894Z shell: /usr/bin/bash -e {0}
2026-11-27T09:14:02.1212310Z ##[endgroup]
2026-11-27T09:14:05.7740217Z ........................................................................ [ 61%]
2026-11-27T09:14:07.0331906Z ..............................F..............                            [100%]
2026-11-27T09:14:07.0345122Z =================================== FAILURES ===================================
2026-11-27T09:14:07.0346011Z ______________________ test_total_applies_discount_once ________________________
2026-11-27T09:14:07.0346700Z
2026-11-27T09:14:07.0347113Z     def test_total_applies_discount_once():
2026-11-27T09:14:07.0347528Z         cart = Cart([Item("book", 2500), Item("pen", 300)], discount=Percent(10))
2026-11-27T09:14:07.0347961Z >       assert cart.total() == 2520
2026-11-27T09:14:07.0348344Z E       assert 2268 == 2520
2026-11-27T09:14:07.0348790Z E        +  where 2268 = total()
2026-11-27T09:14:07.0349184Z
2026-11-27T09:14:07.0349560Z tests/unit/test_cart.py:41: AssertionError
2026-11-27T09:14:07.0350007Z =========================== short test summary info ============================
2026-11-27T09:14:07.0350451Z FAILED tests/unit/test_cart.py::test_total_applies_discount_once - assert 2268 == 2520
2026-11-27T09:14:07.0350902Z 1 failed, 117 passed in 4.61s
2026-11-27T09:14:07.1120045Z ##[error]Process completed with exit code 1.
2026-11-27T09:14:07.1203311Z Post job cleanup.
"""

_INTEGRATION_TESTS = """\
2026-11-27T10:40:11.2093377Z ##[group]Run python -m pytest -q tests/integration
2026-11-27T10:40:11.2101943Z ##[endgroup]
2026-11-27T10:40:52.6630081Z ....................F                                                    [100%]
2026-11-27T10:40:52.6644190Z =================================== FAILURES ===================================
2026-11-27T10:40:52.6645002Z _________________________ test_checkout_survives_restart _________________________
2026-11-27T10:40:52.6645733Z E       ConnectionRefusedError: [Errno 111] Connection refused: orders-db:5432
2026-11-27T10:40:52.6646281Z =========================== short test summary info ============================
2026-11-27T10:40:52.6646844Z FAILED tests/integration/test_checkout.py::test_checkout_survives_restart
2026-11-27T10:40:52.6647290Z 1 failed, 20 passed in 40.87s
2026-11-27T10:40:52.7310562Z ##[error]Process completed with exit code 1.
"""

_LINT = "2026-11-27T09:12:40.5520031Z All checks passed!\n"
_BUILD = "2026-11-27T09:13:31.0043327Z Successfully built shop-2.8.0-py3-none-any.whl\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    job: Job
    log: str
    delay_s: float = 0.1


def _record(job_id: int, name: str, state: JobState, log: str, delay_s: float = 0.1) -> _Record:
    return _Record(job=Job(job_id=job_id, name=name, state=state), log=log, delay_s=delay_s)


_RECORDS: Mapping[int, tuple[_Record, ...]] = MappingProxyType(
    {
        415: (
            _record(810, "lint", JobState.PASSED, _LINT),
            _record(811, "build", JobState.PASSED, _BUILD),
            _record(812, "unit tests", JobState.FAILED, _UNIT_TESTS),
        ),
        416: (
            _record(813, "lint", JobState.PASSED, _LINT),
            _record(814, "build", JobState.PASSED, _BUILD),
        ),
        417: (),
        418: (_record(815, "integration tests", JobState.FAILED, _INTEGRATION_TESTS, delay_s=8.0),),
    }
)


class LocalCi:
    """The stub as a job source. It brings its own timeout: a log that takes 8 s is not waited for."""

    @property
    def timeouts(self) -> Mapping[str, float | None]:
        return {"fetch_job_log": FETCH_TIMEOUT_S}

    async def jobs(self, pr: int | None, attempt: int | None = None) -> Sequence[Job]:
        """The recorded jobs of a pull request.

        Raises:
            SourceError: it is not recorded; the message names those that are.
        """
        await asyncio.sleep(LIST_DELAY_S)
        if pr is None:
            raise SourceError(Fault.NOT_NAMED, f"name a pull request; this source has {_numbers(_RECORDS)}")
        if pr not in _RECORDS:
            raise SourceError(Fault.NOT_FOUND, f"there is no pull request {pr}; this source has {_numbers(_RECORDS)}")
        if attempt not in (None, 1):
            raise SourceError(Fault.NOT_FOUND, f"no job was run a second time: there is no attempt {attempt}")
        return [record.job for record in _RECORDS[pr]]

    async def log(self, job_id: int) -> BinaryIO:
        """The recorded log of a job, after its delay.

        Raises:
            SourceError: it is not recorded; the message names those that are.
        """
        records = {record.job.job_id: record for jobs in _RECORDS.values() for record in jobs}
        if job_id not in records:
            raise SourceError(Fault.NOT_FOUND, f"there is no job {job_id}; this source has {_numbers(records)}")
        await asyncio.sleep(records[job_id].delay_s)
        return io.BytesIO(records[job_id].log.encode())


def _numbers(known: Mapping[int, object]) -> str:
    return ", ".join(str(number) for number in sorted(known))
