"""Read untrusted model files without MLX: headers, configs, SAE layouts, control vectors."""
