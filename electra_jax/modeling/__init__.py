"""The networks: layers, encoder, generator and discriminator."""
