"""Source → patch series → plan → configure and compile → wheel → audit → install."""
