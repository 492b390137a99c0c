"""Five trainings as users write them, for two trainers; ``benchmarks.trainings`` runs them."""
