"""Recordings: decoded, mixed to mono at 16 kHz, cut in windows of 30 s, and their log-mel frames as Whisper's."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from .records import DECODING_ERRORS, UnusableRecordError

SAMPLE_RATE = 16_000
HOP = 160
WINDOW_FRAMES = 3000
MIN_FRAMES = 3  # fewer leave no token after two strides of 2
MAX_SECONDS = 1200.0
MAX_AMPLITUDE = 1e12  # above 1e15 or so the power of the spectrum is not finite
_FFT = 400
Signal = npt.NDArray[np.float32]


def load_audio(path: Path | str) -> Signal:
    """Decodes a recording to float32[samples], mono at 16 kHz.

    Raises:
        UnusableRecordError: If there is no such file, it cannot be decoded, is empty, too short, too long or too loud.
    """
    import soundfile
    import soxr

    if not os.path.isfile(path):
        raise UnusableRecordError(f"the file {path} does not exist")
    try:
        with soundfile.SoundFile(path) as file:
            seconds = file.frames / file.samplerate
            if seconds > MAX_SECONDS:
                raise UnusableRecordError(f"the recording {path} lasts {seconds:.0f} s, above {MAX_SECONDS:.0f} s")
            samples, rate = file.read(dtype="float32", always_2d=True), file.samplerate
    except (soundfile.SoundFileError, *DECODING_ERRORS) as error:
        raise UnusableRecordError(f"the recording {path} cannot be decoded ({error})") from error
    mono = np.nan_to_num(samples.mean(axis=1))
    if not len(mono):
        raise UnusableRecordError(f"the recording {path} is empty")
    resampled: Signal = mono if rate == SAMPLE_RATE else soxr.resample(mono, rate, SAMPLE_RATE)
    if not len(resampled):
        raise UnusableRecordError(f"the recording {path} is too short ({len(mono)} samples at {rate} Hz)")
    if not np.abs(resampled).max() <= MAX_AMPLITUDE:
        raise UnusableRecordError(f"the recording {path} has samples above {MAX_AMPLITUDE:g}, or no numbers")
    return resampled.astype(np.float32)


def windows(signal: Signal) -> list[Signal]:
    """Pieces of at most 30 s, the shortest padded with silence to the frames of one token."""
    size = WINDOW_FRAMES * HOP
    pieces = [signal[start : start + size] for start in range(0, len(signal), size)]
    return [np.pad(piece, (0, max(0, MIN_FRAMES * HOP - len(piece)))) for piece in pieces]


def num_frames(num_samples: int) -> int:
    """Mel frames of a window: one for each hop, also for a last one that is not full."""
    return math.ceil(num_samples / HOP)


def log_mel(signal: Signal, num_mel_bins: int) -> torch.Tensor:
    """Whisper's log-mel spectrogram of one window: what `WhisperFeatureExtractor` gives before its padding.

    Args:
        signal: float32[samples], at most 30 s.
        num_mel_bins: Rows of the spectrogram.

    Returns:
        float32[frames, num_mel_bins], contiguous.
    """
    frames = num_frames(len(signal))
    # The extractor pads to 30 s with silence. A frame reaches 200 samples beyond its own: more silence changes nothing.
    length = min(frames * HOP + _FFT, WINDOW_FRAMES * HOP)
    padded = torch.from_numpy(np.pad(signal, (0, length - len(signal))))
    spectrum = torch.stft(padded, _FFT, HOP, window=torch.hann_window(_FFT), return_complex=True)
    power = spectrum[:, :frames].abs() ** 2
    mel = torch.clamp(_filters(num_mel_bins).T @ power, min=1e-10).log10()
    mel = torch.maximum(mel, mel.max() - 8.0)
    return ((mel + 4.0) / 4.0).T.contiguous()


@functools.lru_cache(maxsize=4)
def _filters(num_mel_bins: int) -> torch.Tensor:
    """float32[201, num_mel_bins]."""
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(
        num_frequency_bins=1 + _FFT // 2,
        num_mel_filters=num_mel_bins,
        min_frequency=0.0,
        max_frequency=8000.0,
        sampling_rate=SAMPLE_RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(bank).to(torch.float32)
