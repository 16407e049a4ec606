"""The main job: see a ring all-reduce, check every algorithm, train a net on all ranks, and check that, too."""
