"""What the origin of a group implies for it, and for the groups that are made from it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dist_prims.backend.origin import GroupRequest, Origin, Repairs, Trait

NO_REPAIRS = Repairs(print, str, print)


def descendant(*origins: Origin) -> GroupRequest:
    """A group of the last origin, made from a group of the origin before it, and so on."""
    inherited = Trait.NONE
    for origin in origins:
        request = GroupRequest(None, "name", 0, 1, timedelta(1), [], None, origin, NO_REPAIRS, inherited)
        inherited = request.heritage
    return request


@pytest.mark.parametrize("origin", Origin)
def test_a_split_group_keeps_what_its_parent_implies(origin: Origin) -> None:
    split = descendant(origin, Origin.SPLIT)
    assert split.traits == descendant(origin).traits | Trait.LISTED
    assert Trait.LISTED not in descendant(origin, Origin.SPLIT, Origin.SURVIVED).traits


def test_only_groups_of_one_launcher_with_all_of_their_ranks_use_mpi_and_its_secret() -> None:
    with_mpi = {origin for origin in Origin if Trait.WITHOUT_MPI not in descendant(origin).traits}
    assert with_mpi == {Origin.LAUNCHED, Origin.SPLIT}
    of_one_launcher = {origin for origin in Origin if Trait.SEVERAL_LAUNCHERS not in descendant(origin).traits}
    assert of_one_launcher == {Origin.LAUNCHED, Origin.SPLIT, Origin.SURVIVED, Origin.RECONFIGURED}


@pytest.mark.parametrize("origin", Origin)
def test_ranks_that_may_know_a_group_by_many_names_have_no_common_name(origin: Origin) -> None:
    has_many = origin in (Origin.MERGED, Origin.RECONFIGURED)
    assert descendant(origin).common_name == ("" if has_many else "name")
