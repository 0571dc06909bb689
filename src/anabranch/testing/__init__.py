"""Tests of streams and processors: feed rows, let time pass, look at state, and let things break in between."""

from anabranch.testing.processors import ProcessorTest
from anabranch.testing.steps import Clock, KillWorker, Rescale, Restart, Rows, Step, Watermark
from anabranch.testing.streams import StreamTest

__all__ = ["Clock", "KillWorker", "ProcessorTest", "Rescale", "Restart", "Rows", "Step", "StreamTest", "Watermark"]
