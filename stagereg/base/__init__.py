"""What every part of the project stands on: small modules that know nothing of staging, joining or checkpoints."""
