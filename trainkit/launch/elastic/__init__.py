"""Elastic jobs: horovodrun's elastic mode hands over to `run_elastic`."""

from trainkit.launch.elastic.driver import run_elastic

__all__ = ["run_elastic"]
