"""Writers of TensorBoard events by framework."""
