"""TensorBoard by the module names that trials of Determined import; see :mod:`det_core.tensorboard.metric_writers`."""
