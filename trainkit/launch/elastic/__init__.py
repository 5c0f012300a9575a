"""Elastic jobs: horovodrun's elastic mode calls `run_elastic`."""

from trainkit.launch.elastic.driver import run_elastic

__all__ = ["run_elastic"]
