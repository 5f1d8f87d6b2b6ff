"""llmjax within systems that start servers themselves."""
