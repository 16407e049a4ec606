"""Which launcher has started this process, and its rank and size: from environment variables alone."""

from __future__ import annotations

import re

import pytest
from launching import TORCH

from dist_prims.launch import detect
from dist_prims.rendezvous.detect_launcher import from_url

PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}
PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
SLURM["SLURM_STEP_NODELIST"] = "n[08-09]"
BATCH_SCRIPT = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}


@pytest.mark.parametrize(
    ("environ", "name", "medium"),
    [
        (TORCH, "environment variables", ""),
        ({**TORCH, "TORCHELASTIC_RUN_ID": "x"}, "torchrun", ""),
        (OPEN_MPI, "mpirun of Open MPI", "MPI"),
        ({**PMI, "MPI_LOCALNRANKS": "4"}, "mpirun of MPICH", "MPI"),
        ({**PMI, "MPI_LOCALNRANKS": "4", "I_MPI_X": ""}, "mpirun of Intel MPI", "MPI"),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4", "PMI_ID": "1"}, "mpirun_rsh of MVAPICH", "MPI"),
        ({"MVP_COMM_WORLD_RANK": "1", "MVP_COMM_WORLD_SIZE": "4"}, "mpirun_rsh of MVAPICH", "MPI"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", **PMI}, "Flux", "PMI"),
        ({"PALS_RANKID": "1", **PMI}, "mpiexec of Cray PALS", "MPI"),
        ({**PMI, "PMI_FD": "9"}, "a PMI process manager", "PMI"),
        (SLURM, "srun", ""),
        ({**SLURM, **PMI}, "srun", ""),  # srun --mpi=pmi2
        ({**SLURM, **OPEN_MPI}, "mpirun of Open MPI", "MPI"),
        ({**SLURM, "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}, "Flux", "PMI"),
        ({**TORCH, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "environment variables", ""),
        ({**TORCH, "PALS_RANKID": "1", **PMI}, "environment variables", ""),
    ],
)
def test_the_launcher_is_known_by_what_only_it_sets(environ: dict[str, str], name: str, medium: str) -> None:
    found = detect(environ)
    assert (found.name, found.rank, found.size, found.medium) == (name, 1, 4, medium)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SCRIPT,
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "64", "SLURM_JOB_ID": "7"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "PALS_LOCAL_SIZE": "1"},  # of no known launcher
    ],
)
def test_a_single_process_is_alone(environ: dict[str, str]) -> None:
    found = detect(environ)
    assert (found.name, found.rank, found.size) == ("python", 0, 1)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a-1@1", "PRTE_LAUNCHED": "1"}, "prun"),
        (PMIX, "a PMIx launcher"),
        ({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "2", **PMIX}, "mpiexec of Cray PALS"),
        ({"PMI_ID": "1", "PMI_PORT": "a:1", "MPI_LOCALNRANKS": "2"}, "mpirun of MPICH"),
    ],
)
def test_where_no_variable_says_the_size_mpi_does(environ: dict[str, str], name: str) -> None:
    found = detect(environ)
    assert (found.name, found.rank, found.size, found.medium) == (name, 1, None, "MPI")
    with pytest.raises(ValueError, match="needs rank= and world_size="):
        from_url("tcp://a:1", environ=environ)


def test_the_step_of_srun_determines_the_address() -> None:
    assert re.fullmatch(r"tcp://n08:\d+", detect(SLURM).url or "")
    assert detect({**SLURM, "SLURM_STEP_ID": "1"}).url != detect(SLURM).url
    assert (detect({**SLURM, "SLURM_STEP_NODELIST": "n08"}).url or "").startswith("tcp://127.0.0.1:")
    assert detect({**SLURM, "DIST_PRIMS_PORTS": "30000-30001"}).url in ("tcp://n08:30000", "tcp://n08:30001")
    by_the_script = {"MASTER_ADDR": "n09", "MASTER_PORT": "23456"}  # as scripts for torch set it
    assert detect({**SLURM, **by_the_script}).url == "tcp://n09:23456"


@pytest.mark.parametrize(
    ("environ", "evidence"),
    [
        (PMI, "PMI_SIZE=4, PMI_RANK=1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "PMI_SIZE=4"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3"),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE=2"),
        ({"PALS_LOCAL_SIZE": "2"}, "PALS_LOCAL_SIZE=2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_SIZE=2, JSM_NAMESPACE_RANK=1"),
        ({"SLURM_PROCID": "2"}, "SLURM_PROCID=2"),
    ],
)
def test_several_ranks_by_no_known_launcher_are_refused(environ: dict[str, str], evidence: str) -> None:
    with pytest.raises(ValueError, match="one of several ranks, but its launcher is not known") as caught:
        detect(environ)
    assert f"init: {evidence}: this process" in str(caught.value)
    assert "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank" in str(caught.value)
    assert "unset " in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 indicates several ranks, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({**TORCH, "RANK": "4"}, "rank 4 of 4"),
        ({"PMI_RANK": "1", "PMI_SIZE": "many", "PMI_FD": "3"}, "PMI_SIZE='many' is not a number; start the ranks with"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        detect(environ)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://relative", "give 'env://', 'tcp://host:port' or 'file:///absolute/path'"),
        ("tcp://fd00::1:29500", "an IPv6 address has brackets: 'tcp://\\[fd00::1\\]:29500'"),
        ("tcp://localhost:1", "needs rank= and world_size="),
        ("env://", "needs RANK, WORLD_SIZE"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_url(url, environ={})
