"""A trial class as a program: ``python -m det_core.exec.harness model_def:MyTrial``."""
