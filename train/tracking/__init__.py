"""Experiment tracking: a run's curves, figures and files in CSV, TensorBoard, W&B and MLflow."""
