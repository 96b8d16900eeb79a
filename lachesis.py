def main() -> None: pass
