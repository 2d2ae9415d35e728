package main

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "example.com/chat/gen/meshserve/v1"
)

const (
	firstDelay = 50 * time.Millisecond
	maxDelay   = 2 * time.Second
)

// run is the state of one request across all its attempts.
type run struct {
	client   pb.InferenceServiceClient
	request  *pb.ChatRequest
	sampling *pb.SamplingParams
	prompt   []uint32
	limit    int // tokens that can come at most, counted from the first attempt
	received []uint32
	attempts int
}

// resume streams a chat of one sample, and resumes it wherever it is interrupted: no token is lost, and none is repeated.
//
// A token depends only on the prompt, the seed and its position. After an interruption, the prompt and the tokens received
// so far are therefore sent as a new prompt with the same seed, to any replica of the same model. At most maxFailures
// attempts in a row may fail without a new token. show gets what is new; the last response has its finish set.
func resume(
	ctx context.Context, client pb.InferenceServiceClient, request *pb.ChatRequest, maxFailures int,
	show func(*pb.GenerateResponse),
) error {
	r := &run{client: client, request: request, sampling: &pb.SamplingParams{}}
	if request.GetSampling() != nil {
		r.sampling = proto.Clone(request.GetSampling()).(*pb.SamplingParams)
	}
	if r.sampling.Seed == nil {
		r.sampling.Seed = proto.Uint64(uint64(rand.Int63()))
	}
	for failures := 0; ; failures++ {
		before := len(r.received)
		isFinished, err := r.attempt(ctx, show)
		if isFinished || ctx.Err() != nil {
			return err
		}
		if len(r.received) > before {
			failures = 0
		}
		_, retry := detailsOf(err)
		switch code := status.Code(err); {
		case failures >= maxFailures:
			return err
		case code == codes.Unavailable, code == codes.Canceled, code == codes.ResourceExhausted && retry != nil:
		default:
			return err
		}
		delay := min(firstDelay<<min(failures, 10), maxDelay)
		delay = delay/2 + time.Duration(rand.Int63n(int64(delay/2)))
		if retry != nil {
			delay = max(delay, *retry)
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return ctx.Err()
		}
		if r.prompt != nil && len(r.received) >= r.limit { // only the last message was lost
			show(&pb.GenerateResponse{Finish: &pb.Finish{Reason: pb.FinishReason_FINISH_REASON_LENGTH}})
			return nil
		}
	}
}

// attempt sends the request once, and returns whether the stream has come to its end.
func (r *run) attempt(ctx context.Context, show func(*pb.GenerateResponse)) (bool, error) {
	if r.prompt == nil {
		if err := r.prepare(ctx); err != nil {
			return false, err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := r.client.Generate(ctx, r.next())
	if err != nil {
		return false, err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return true, errors.New("the stream ended before its last message")
		}
		if err != nil {
			return false, err
		}
		r.received = append(r.received, response.GetTokenIds()...)
		if response.GetFinish().GetReason() == pb.FinishReason_FINISH_REASON_ERROR {
			return true, errors.New(response.GetFinish().GetMessage())
		}
		show(response)
		if response.GetFinish() != nil {
			return true, nil
		}
	}
}

// prepare tokenizes the prompt, and finds how many tokens can come.
func (r *run) prepare(ctx context.Context) error {
	var contextTokens uint32
	if r.sampling.MaxTokens == nil {
		info, err := r.client.GetModelInfo(ctx, &pb.GetModelInfoRequest{})
		if err != nil && status.Code(err) != codes.PermissionDenied {
			return err
		}
		contextTokens = info.GetMaxContextTokens() // 0 if the token does not permit to know it
		if most := info.GetDefaultSampling().GetMaxTokens(); most > 0 {
			r.sampling.MaxTokens = proto.Uint32(most)
		}
	}
	tokens, err := r.client.Tokenize(ctx, &pb.TokenizeRequest{Input: &pb.TokenizeRequest_Conversation{
		Conversation: &pb.Conversation{
			Messages:            r.request.Messages,
			EnableThinking:      r.request.EnableThinking,
			Tools:               r.request.Tools,
			AddGenerationPrompt: r.request.AddGenerationPrompt, ContinueLastMessage: r.request.ContinueLastMessage,
		},
	}})
	if err != nil {
		return err
	}
	r.prompt = tokens.GetTokenIds()
	r.limit = math.MaxInt
	if contextTokens > 0 {
		r.limit = int(contextTokens) - len(r.prompt)
	}
	if r.sampling.MaxTokens != nil {
		r.limit = int(r.sampling.GetMaxTokens())
	}
	return nil
}

// next returns the request of the next attempt.
func (r *run) next() *pb.GenerateRequest {
	sampling := proto.Clone(r.sampling).(*pb.SamplingParams)
	if sampling.MaxTokens != nil {
		sampling.MaxTokens = proto.Uint32(sampling.GetMaxTokens() - uint32(len(r.received)))
	}
	sampling.NumResumedTokens = proto.Uint32(sampling.GetNumResumedTokens() + uint32(len(r.received)))
	if len(r.received) > 0 {
		sampling.PromptLogprobs = nil // they came before the first token
	}
	ids := append(append([]uint32{}, r.prompt...), r.received...)
	request := &pb.GenerateRequest{
		Prompt:    &pb.GenerateRequest_TokenIds{TokenIds: &pb.TokenIds{TokenIds: ids}},
		Sampling:  sampling,
		Priority:  r.request.Priority,
		CacheSalt: r.request.CacheSalt,
	}
	if r.attempts == 0 {
		request.RequestId = r.request.RequestId // later ones get new ids: this one may still be in use
	}
	r.attempts++
	return request
}
