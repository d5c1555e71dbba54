"""Fine-tuning: tasks, their data, predictions and scores."""
